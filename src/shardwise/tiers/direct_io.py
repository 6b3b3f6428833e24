"""Transfers to and from a file without a name, past the page cache, in threads of their own.

The file holds what one rank stores of one state. It never has a name that outlives its opening, so
the kernel frees it when the process ends, by whatever cause: there are no stale files to sweep
after a kill -9.

Transfers go past the page cache (O_DIRECT) where the file system takes that. Where it does not,
they go through it and the pages are dropped at once: what rests on the disk is nowhere else.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import sys
import uuid
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import NamedTuple, ParamSpec

from shardwise.errors import TierError
from shardwise.tiers.host_memory import PAGE
from shardwise.tiers.staging import Staging
from shardwise.timeline import Row, recorder

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""What a file system says when it has no room, a user no quota, or a process a lower limit."""

REFUSED = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EISDIR})
"""What a file system says to a request that it does not know."""


class DirectFile:
    """A file of `nbytes` (a multiple of 4096) in `folder`, zeros at first.

    All of it is reserved at the start, so that a full disk is an error then and not in mid-run.
    Without `nbytes` the file is as long as what is written to it. `label` and `rank` stand in the
    messages. `direct` says whether transfers pass the page cache.

    `read` and `write` may be called from many threads at once, and release the GIL.

    Raises:
        TierError: The folder is missing, is no folder, is not writable, or lies in memory; the
            disk has no room; or, from `read` and `write`, a transfer failed.
    """

    def __init__(self, folder: Path, label: str, rank: int, nbytes: int | None = None) -> None:
        self._label = label
        """What messages call it that say the same on every rank."""
        self._of = f"{label} of rank {rank}"
        self._folder = folder
        self._check_folder()
        self._fd = self._open(f".shardwise-{label}-{rank}-{uuid.uuid4().hex}")
        self.close = weakref.finalize(self, os.close, self._fd)
        """Gives the disk back; nothing may be in flight. Happens by itself at exit, too."""
        try:
            if nbytes is not None:
                self._reserve(nbytes)
            self.direct = nbytes != 0 and self._go_direct()
        except TierError:
            self.close()
            raise
        if not self.direct:
            # No reading ahead of the kernel's own, which nothing would drop again.
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_RANDOM)

    def _check_folder(self) -> None:
        if sys.platform != "linux":
            raise TierError(
                f"{self._label} cannot rest in {self._folder}: the nvme tier needs Linux, and this "
                f"is {sys.platform}. Keep the state on the tier cpu or device."
            )
        if not self._folder.is_dir():
            found = "it is not a folder" if self._folder.exists() else "there is no such folder"
            raise TierError(
                f"{self._label} cannot rest in {self._folder}: {found}. Make the folder, or name "
                "another one on a local disk."
            )
        mount = mount_of(self._folder)
        if mount.kind in IN_MEMORY:
            raise TierError(
                f"{self._label} cannot rest in {self._folder}: it lies on {mount.point}, a "
                f"{mount.kind}, which is memory and not a disk. Name a folder on a disk, or take "
                "the tier cpu."
            )

    def _open(self, name: str) -> int:
        """A file without a name; where that is unknown, its name is removed at once."""
        try:
            try:
                return os.open(self._folder, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
            except OSError as error:
                if error.errno not in REFUSED:
                    raise
            path = self._folder / name
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            path.unlink()
            return fd
        except OSError as error:
            raise TierError(
                f"{self._label} cannot rest in {self._folder}: no file can be made there "
                f"({error.strerror}). Name a folder that this user may write to."
            ) from error

    def _reserve(self, nbytes: int) -> None:
        """Allocate all blocks of the file."""
        # Look at the free space first: filling a disk to find that it is too small would hurt
        # every other program on it.
        if nbytes > self._free():
            raise self._too_small(nbytes)
        if nbytes == 0:
            return
        try:
            os.posix_fallocate(self._fd, 0, nbytes)
        except OSError as error:
            if error.errno in FULL:
                # Give back what it got, so that the message tells the true free space.
                os.ftruncate(self._fd, 0)
                raise self._too_small(nbytes) from error
            if error.errno not in REFUSED:
                raise self._failed("reserve", nbytes, 0, error) from error
            os.ftruncate(self._fd, nbytes)

    def _free(self) -> int:
        status = os.fstatvfs(self._fd)
        return status.f_bavail * status.f_frsize

    def _too_small(self, nbytes: int) -> TierError:
        return TierError(
            f"{self._of} needs {nbytes} bytes in {self._folder}, and only {self._free()} "
            "are free for it. Free some (other ranks of this host need theirs too), raise the "
            "quota or file size limit, or name a folder on a larger disk."
        )

    def _go_direct(self) -> bool:
        """Turn O_DIRECT on and try it; some file systems refuse only the first transfer."""
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        page = Staging(PAGE).view
        try:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags | os.O_DIRECT)
            os.preadv(self._fd, [page], 0)
            os.pwritev(self._fd, [page], 0)
        except OSError as error:
            if error.errno not in REFUSED:
                raise self._failed("try", PAGE, 0, error) from error
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags)
            return False
        return True

    def read(self, into: memoryview, offset: int) -> None:
        """Fill `into` from the bytes at `offset`; both are multiples of 4096."""
        with self._noted("read", into):
            self._read(into, offset)

    def _noted(self, verb: str, memory: memoryview) -> AbstractContextManager[None]:
        """Stands in the timeline."""
        if recorder.active is None:
            return nullcontext()
        return recorder.span(f"{verb} {self._of}", Row.TIERS, {"bytes": memory.nbytes})

    def _read(self, into: memoryview, offset: int) -> None:
        # A transfer may be short (signals, the limit of 2 GB a call).
        done = 0
        while done < len(into):
            try:
                got = os.preadv(self._fd, [into[done:]], offset + done)
            except OSError as error:
                raise self._failed("read", len(into), offset, error) from error
            if got == 0:
                raise TierError(
                    f"{self._of} in {self._folder} ends at byte {offset + done}, before what was "
                    "written: something has cut the file. Start again from a checkpoint."
                )
            done += got
        self._forget(offset, len(into))

    def write(self, data: memoryview, offset: int) -> None:
        """Write `data` at `offset`; both are multiples of 4096."""
        with self._noted("write", data):
            self._write(data, offset)

    def _write(self, data: memoryview, offset: int) -> None:
        # The kernel drops only clean pages: without O_DIRECT each write goes through to the disk.
        how = 0 if self.direct else os.RWF_DSYNC
        done = 0
        while done < len(data):
            try:
                done += os.pwritev(self._fd, [data[done:]], offset + done, how)
            except OSError as error:
                raise self._failed("write", len(data), offset, error) from error
        self._forget(offset, len(data))

    def _forget(self, offset: int, length: int) -> None:
        # What rests on the disk must not rest in memory too: offloading is there to save that.
        if not self.direct:
            os.posix_fadvise(self._fd, offset, length, os.POSIX_FADV_DONTNEED)

    def _failed(self, verb: str, length: int, offset: int, error: OSError) -> TierError:
        advice = (
            f"{self._free()} bytes are free there: free some, and start again from a checkpoint."
            if error.errno in FULL
            else "Look at the disk (dmesg, smartctl), and start again from a checkpoint."
        )
        return TierError(
            f"{self._of} in {self._folder}: could not {verb} {length} bytes at {offset} "
            f"({error.strerror}). {advice}"
        )


IN_MEMORY = frozenset({"tmpfs", "ramfs", "rootfs", "devtmpfs", "hugetlbfs"})
"""File systems whose files are memory."""

MOUNTS = Path("/proc/self/mountinfo")


class Mount(NamedTuple):
    """A mounted file system: where, and of what type (ext4, xfs, tmpfs, ...)."""

    point: Path
    kind: str


def mount_of(folder: Path) -> Mount:
    """The file system that `folder` lies on, as the kernel lists it."""
    # Bytes: names of other people's mounts need not be UTF-8.
    return find(folder.resolve(), os.fsdecode(MOUNTS.read_bytes()))


def find(folder: Path, mountinfo: str) -> Mount:
    """The mount that holds the absolute path `folder`, out of the text of a mountinfo file.

    Of several on one mount point the last one counts: it lies on top.
    """
    mounts = []
    for line in mountinfo.splitlines():
        # See proc_pid_mountinfo(5). Optional fields end with a lone hyphen. The kernel writes
        # blanks and backslashes of the path as three octal digits.
        left, _, right = line.partition(" - ")
        point = re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), left.split(" ")[4])
        mounts.append(Mount(Path(point), right.split(" ")[0]))
    holding = [mount for mount in mounts if folder.is_relative_to(mount.point)]
    return max(reversed(holding), key=lambda mount: len(mount.point.parts))


CHUNK = 4 * 2**20
"""Bytes of one transfer: 1 MB is a third slower here, 16 MB no faster."""

THREADS = 4
"""Transfers at once. Two are enough for the disk that this was measured on."""

_P = ParamSpec("_P")


class Transfers:
    """Moves bytes in a few threads of this process; `label` names them, and stands in messages.

    A forked process has none of the threads and would wait for ever, so it is refused.
    """

    def __init__(self, label: str) -> None:
        self._label = label
        self._process = os.getpid()
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix=f"shardwise-{label}")
        # Without waiting: it may be one of the threads that lets go of this last.
        weakref.finalize(self, self._threads.shutdown, wait=False).atexit = False

    def start(self, move: Callable[_P, None], *args: _P.args, **kwargs: _P.kwargs) -> Future[None]:
        """Call `move` in a thread, as soon as one is free."""
        return self._threads.submit(move, *args, **kwargs)

    @property
    def forked(self) -> bool:
        """Whether this process was forked from the one that has the threads."""
        return self._process != os.getpid()

    def check(self) -> None:
        """Raise TierError in a forked process."""
        if self.forked:
            raise TierError(
                f"{self._label} rests on a file of process {self._process}, and this is process "
                f"{os.getpid()}, forked from it. Use the state in the process that made it."
            )

    def end(self) -> None:
        """Return when all is moved and the threads are gone."""
        self._threads.shutdown()
