"""Locks a folder of checkpoints, so that only one job at a time saves into it.

The kernel (or the file server) manages the lock and releases it when the process that acquired it
exits, even if it is killed. When the job restarts, or another job starts, it can then acquire the
lock. The lock file names the job that holds the lock, for human readers. The mere existence of the
file locks nothing.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import sys
import threading
import time
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from shardwise.errors import FolderInUse
from shardwise.messages.printable import printable

LOCK = ".lock"
"""Name of the lock file in the folder of a run's checkpoints."""

PATIENCE = 10.0
"""Seconds to wait for the lock, in case the previous start of this job is still exiting."""

PAUSE = 0.1
"""Seconds between two attempts to acquire the lock."""

_TAKEN = frozenset({errno.EACCES, errno.EAGAIN})
_UNKNOWN = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL})
"""Error numbers of file systems without locks."""


@dataclass
class _Lock:
    """A lock that this process holds. `claims` is the number of FolderClaims that share it."""

    fd: int
    path: Path
    process: int = field(default_factory=os.getpid)
    claims: int = 1

    def holds(self) -> bool:
        """Return whether the lock file is still the file that was locked."""
        return _identity(self.path) == _identity(self.fd)


_mutex = threading.Lock()
_locks: dict[Path, _Lock] = {}
"""Locks by path of the lock file. A process loses its POSIX lock on a file when it closes any
descriptor of that file, so all engines in a process must share one descriptor."""


@dataclass
class FolderClaim:
    """This job's claim on a folder into which it saves.

    Args:
        locked: False if the file system has no locks, so that the claim cannot stop other jobs.
    """

    folder: Path
    locked: bool
    _lock: _Lock | None

    def holds(self) -> bool:
        """Return whether the claim is still valid. If the folder was removed, it is not."""
        return self._lock is None or self._lock.holds()

    def release(self) -> None:
        """Release the folder, so that other jobs can claim it. Idempotent."""
        lock, self._lock = self._lock, None
        if lock is None or lock.process != os.getpid():  # a forked child does not own the lock
            return
        with _mutex:
            lock.claims -= 1
            if lock.claims:
                return
            if _locks.get(lock.path) is lock:
                del _locks[lock.path]
            # Unlink the file before unlocking it. Otherwise another job could lock a file that this
            # one then removes.
            if lock.holds():
                lock.path.unlink(missing_ok=True)
            os.close(lock.fd)


def take(folder: Path, patience: float | None = None) -> FolderClaim:
    """Claim `folder` for this job. Creates the folder if it does not exist.

    Raises FolderInUse if another job still holds the lock after `patience` seconds (default
    PATIENCE), and OSError if no file can be created in the folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    patience = PATIENCE if patience is None else patience
    deadline = time.monotonic() + patience
    while True:
        with _mutex:
            claim = _try_to_claim(folder)
        if isinstance(claim, FolderClaim):
            return claim
        if time.monotonic() >= deadline:
            raise FolderInUse(
                f"Another job saves into {folder}: {claim}. Two jobs would remove each other's "
                "checkpoints. Give this job its own folder, or stop the other one. To load one of "
                f'its checkpoints: engine.load("{folder}/step-N").'
            )
        time.sleep(PAUSE)


def _try_to_claim(folder: Path) -> FolderClaim | str:
    """Return a claim, or the name of the job that holds the lock."""
    path = folder.resolve() / LOCK
    held = _locks.get(path)
    if held is not None and held.process == os.getpid() and held.holds():
        # Several engines in this process may save into the same folder.
        held.claims += 1
        return FolderClaim(folder, True, held)
    while True:
        # Use O_NOFOLLOW, because a link planted in a shared folder could redirect the write to
        # another file.
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            # Use lockf, because on some NFS clients flock works only within one host.
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            # The holder may be on another host, so read its name from the file.
            holder = _read_holder(fd)
            os.close(fd)
            if error.errno in _TAKEN:
                return holder
            if error.errno in _UNKNOWN:
                # Saving without a lock is better than not saving. The caller warns the user.
                return FolderClaim(folder, False, None)
            raise
        if _identity(path) != _identity(fd):  # the holder removed it between open and lock
            os.close(fd)
            continue
        lock = _locks[path] = _Lock(fd, path)
        _write_holder(fd)
        return FolderClaim(folder, True, lock)


def _identity(file: Path | int) -> tuple[int, int] | None:
    try:
        status = os.stat(file)
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


def _write_holder(fd: int) -> None:
    name = {
        "script": sys.argv[0] if sys.argv else "",
        "process": os.getpid(),
        "host": socket.gethostname(),
        "since": datetime.now().isoformat(" ", "seconds"),
    }
    data = json.dumps(name).encode() + b"\n"
    try:
        # Write before truncating, so that no reader sees an empty file.
        os.pwrite(fd, data, 0)
        os.ftruncate(fd, len(data))
    except OSError:  # for example, the disk is full; the lock works even if the file is empty
        os.ftruncate(fd, 0)


def _read_holder(fd: int) -> str:
    try:
        holder: dict[str, Any] = json.loads(os.pread(fd, 4096, 0))
        words = "{script} (process {process} on {host}, since {since})".format(**holder)
    except (ValueError, TypeError, KeyError, AttributeError, IndexError):
        return "a job that did not record its name"
    return printable(words[:300])
