"""Transfers data to and from an unnamed file in separate threads, bypassing the page cache.

A file holds the data of one state on one rank. Once open, it has no name, so the kernel frees it
when the process exits for any reason: no stale files remain after a kill -9.

Transfers bypass the page cache (O_DIRECT) if the file system supports that. Otherwise they use the
page cache and drop the pages at once, because offloaded data must not stay in memory.
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
"""Error numbers for a full file system, an exceeded quota, or a limit on the file's size."""

REFUSED = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EISDIR})
"""Error numbers for an operation that the file system does not support."""


class DirectFile:
    """An unnamed file in `folder` whose transfers bypass the page cache if possible.

    `read` and `write` may be called from several threads at once, and release the GIL. `direct` is
    True if transfers bypass the page cache.

    Args:
        folder: A folder on a disk.
        label: The data's name in messages.
        rank: This rank's index, for messages.
        nbytes: Size of the file, a multiple of 4096. The file is filled with zeros and reserved at
            once, so that a full disk raises now and not in the middle of a run. If None, the file
            grows as it is written.

    Raises:
        TierError: If the folder does not exist, is not a folder, is not writable, or is in memory;
            if the disk has too little space; or, from `read` and `write`, if a transfer failed.
    """

    def __init__(self, folder: Path, label: str, rank: int, nbytes: int | None = None) -> None:
        self._label = label
        """Name in messages that are identical on every rank."""
        self._name = f"{label} of rank {rank}"
        self._folder = folder
        self._check_folder()
        self._fd = self._open(f".shardwise-{label}-{rank}-{uuid.uuid4().hex}")
        self.close = weakref.finalize(self, os.close, self._fd)
        """Frees the disk space. Must not be called during a transfer. Also called automatically at
        exit."""
        try:
            if nbytes is not None:
                self._reserve(nbytes)
            self.direct = nbytes != 0 and self._go_direct()
        except TierError:
            self.close()
            raise
        if not self.direct:
            # Disable the kernel's read-ahead, because nothing would drop the pages that it reads.
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_RANDOM)

    def _check_folder(self) -> None:
        if sys.platform != "linux":
            raise TierError(
                f"{self._label} cannot be stored in {self._folder}: the nvme tier needs Linux, and "
                f"this is {sys.platform}. Use the tier cpu or device."
            )
        if not self._folder.is_dir():
            problem = "it is not a folder" if self._folder.exists() else "there is no such folder"
            raise TierError(
                f"{self._label} cannot be stored in {self._folder}: {problem}. Make the folder, "
                "or name another one on a local disk."
            )
        mount = mount_of(self._folder)
        if mount.kind in IN_MEMORY:
            raise TierError(
                f"{self._label} cannot be stored in {self._folder}: it is on {mount.point}, a "
                f"{mount.kind}, which is memory, not a disk. Name a folder on a disk, or use the "
                "tier cpu."
            )

    def _open(self, name: str) -> int:
        """Open an unnamed file or, if unsupported, a named one whose name is removed at once."""
        try:
            try:
                return os.open(self._folder, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
            except OSError as error:
                if error.errno not in REFUSED:
                    raise
            path = self._folder / name
            # O_EXCL prevents other users from planting a file, 0o600 from reading the state.
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            path.unlink()
            return fd
        except OSError as error:
            raise TierError(
                f"{self._label} cannot be stored in {self._folder}: no file can be created there "
                f"({error.strerror}). Name a folder that this user may write to."
            ) from error

    def _reserve(self, nbytes: int) -> None:
        # Check the free space first: filling the disk before failing would harm every other program
        # that uses the disk.
        if nbytes > self._free():
            raise self._too_small(nbytes)
        if nbytes == 0:
            return
        try:
            os.posix_fallocate(self._fd, 0, nbytes)
        except OSError as error:
            if error.errno in FULL:
                # Release the allocated part, so that the message reports the true free space.
                os.ftruncate(self._fd, 0)
                raise self._too_small(nbytes) from error
            if error.errno not in REFUSED:
                raise self._failed("reserve", nbytes, 0, error) from error
            # Without fallocate, only the size can be set: a full disk then raises on a later write.
            os.ftruncate(self._fd, nbytes)

    def _free(self) -> int:
        status = os.fstatvfs(self._fd)
        return status.f_bavail * status.f_frsize

    def _too_small(self, nbytes: int) -> TierError:
        return TierError(
            f"{self._name} needs {nbytes} bytes in {self._folder}, and only {self._free()} are "
            "free. Free some space (the other ranks of this host need space as well), raise the "
            "quota or file size limit, or name a folder on a larger disk."
        )

    def _go_direct(self) -> bool:
        """Enable O_DIRECT if the file system supports it. Return whether it does."""
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        page = Staging(PAGE).view
        try:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags | os.O_DIRECT)
            # Some file systems accept the flag but reject the first transfer.
            os.preadv(self._fd, [page], 0)
            os.pwritev(self._fd, [page], 0)
        except OSError as error:
            if error.errno not in REFUSED:
                raise self._failed("transfer", PAGE, 0, error) from error
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags)
            return False
        return True

    def read(self, into: memoryview, offset: int) -> None:
        """Read bytes from `offset` on, until `into` is full.

        `offset` and the length of `into` must be multiples of 4096.
        """
        with self._recorded("read", into):
            self._read(into, offset)

    def _recorded(self, verb: str, memory: memoryview) -> AbstractContextManager[None]:
        """Return a context manager that records a transfer in the timeline."""
        if recorder.active is None:
            return nullcontext()
        return recorder.span(f"{verb} {self._name}", Row.TIERS, {"bytes": memory.nbytes})

    def _read(self, into: memoryview, offset: int) -> None:
        # A call may transfer fewer bytes than requested (signals, the limit of 2 GB per call).
        done = 0
        while done < len(into):
            try:
                count = os.preadv(self._fd, [into[done:]], offset + done)
            except OSError as error:
                raise self._failed("read", len(into), offset, error) from error
            if count == 0:
                raise TierError(
                    f"{self._name} in {self._folder} ends at byte {offset + done}, but more was "
                    "written: the file was truncated. Start again from a checkpoint."
                )
            done += count
        self._drop_pages(offset, len(into))

    def write(self, data: memoryview, offset: int) -> None:
        """Write `data` at `offset`.

        `offset` and the length of `data` must be multiples of 4096.
        """
        with self._recorded("write", data):
            self._write(data, offset)

    def _write(self, data: memoryview, offset: int) -> None:
        # Without O_DIRECT each write must wait for the disk, because the kernel drops only clean
        # pages.
        flags = 0 if self.direct else os.RWF_DSYNC
        done = 0
        while done < len(data):
            try:
                done += os.pwritev(self._fd, [data[done:]], offset + done, flags)
            except OSError as error:
                raise self._failed("write", len(data), offset, error) from error
        self._drop_pages(offset, len(data))

    def _drop_pages(self, offset: int, length: int) -> None:
        """Drop a range of the file from the page cache."""
        if not self.direct:
            os.posix_fadvise(self._fd, offset, length, os.POSIX_FADV_DONTNEED)

    def _failed(self, verb: str, length: int, offset: int, error: OSError) -> TierError:
        advice = (
            f"{self._free()} bytes are free there: free some, and start again from a checkpoint."
            if error.errno in FULL
            else "Check the disk (dmesg, smartctl), and start again from a checkpoint."
        )
        return TierError(
            f"{self._name} in {self._folder}: could not {verb} {length} bytes at {offset} "
            f"({error.strerror}). {advice}"
        )


IN_MEMORY = frozenset({"tmpfs", "ramfs", "rootfs", "devtmpfs", "hugetlbfs"})
"""File system types that keep files in memory."""

MOUNTS = Path("/proc/self/mountinfo")


class Mount(NamedTuple):
    """A mounted file system: its mount point and its type (ext4, xfs, tmpfs, ...)."""

    point: Path
    kind: str


def mount_of(folder: Path) -> Mount:
    """Return the file system that contains `folder`, according to the kernel's mount list."""
    # Read as bytes, because mount points need not be UTF-8.
    return find(folder.resolve(), os.fsdecode(MOUNTS.read_bytes()))


def find(folder: Path, mountinfo: str) -> Mount:
    """Return the mount that contains the absolute path `folder`, given a mountinfo file's text.

    If several mounts share a mount point, the last one wins, because it hides the others.
    """
    mounts = []
    for line in mountinfo.splitlines():
        # See proc_pid_mountinfo(5). Optional fields end with a single hyphen. The kernel escapes
        # blanks and backslashes in a path as a backslash and three octal digits.
        left, _, right = line.partition(" - ")
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), left.split(" ")[4])
        mounts.append(Mount(Path(point), right.split(" ")[0]))
    holding = [mount for mount in mounts if folder.is_relative_to(mount.point)]
    # The deepest mount point wins. `max` returns the first of several, so reverse to prefer the
    # last.
    return max(reversed(holding), key=lambda mount: len(mount.point.parts))


CHUNK = 4 * 2**20
"""Size of one transfer in bytes. On the test machine 1 MB is a third slower, and 16 MB is no
faster."""

THREADS = 4
"""Number of concurrent transfers. Two suffice for the test machine's disk."""

_P = ParamSpec("_P")


class Transfers:
    """Runs transfers in a few threads of this process. `label` names the threads.

    A forked process does not inherit the threads, so a transfer would never finish there. In such a
    process, `check` raises.
    """

    def __init__(self, label: str) -> None:
        self._label = label
        self._process = os.getpid()
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix=f"shardwise-{label}")
        # Do not wait, because one of the threads may drop the last reference to this object.
        weakref.finalize(self, self._threads.shutdown, wait=False).atexit = False

    def start(self, move: Callable[_P, None], *args: _P.args, **kwargs: _P.kwargs) -> Future[None]:
        """Call `move` in the next free thread, and return its future."""
        return self._threads.submit(move, *args, **kwargs)

    @property
    def forked(self) -> bool:
        """True if this process was forked from the process that started the threads."""
        return self._process != os.getpid()

    def check(self) -> None:
        """Raise TierError if this is a forked process."""
        if self.forked:
            raise TierError(
                f"{self._label} is in a file of process {self._process}, but this is process "
                f"{os.getpid()}, which was forked from it. Use the state only in the process that "
                "created it."
            )

    def end(self) -> None:
        """Wait until all transfers have completed, and stop the threads."""
        self._threads.shutdown()
