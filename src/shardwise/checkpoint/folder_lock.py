"""Locks a folder of checkpoints, so that one job at a time saves into it.

The lock is the kernel's (or a file server's), so it ends with the process that holds it, however
that ends, and the job's next start, or another job, takes it. The file says whose it is; one that
is left behind by a killed job means nothing.
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
"""The file that is locked, in the folder of a run's checkpoints."""

PATIENCE = 10.0
"""Seconds that the end of another process may take, as that of this job's start before."""

PAUSE = 0.1
"""Seconds between two tries."""

_TAKEN = frozenset({errno.EACCES, errno.EAGAIN})
_UNKNOWN = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL})
"""What file systems say that have no locks."""


@dataclass
class _Lock:
    """A lock of this process, and how many claims stand on it."""

    fd: int
    path: Path
    process: int = field(default_factory=os.getpid)
    claims: int = 1

    def holds(self) -> bool:
        """Whether it is still on the file of that name, which someone may have removed."""
        return _identity(self.path) == _identity(self.fd)


_mutex = threading.Lock()
_locks: dict[Path, _Lock] = {}
"""By file, since a process that closes a file once loses its lock, however often it has it open:
engines of one process share theirs."""


@dataclass
class FolderClaim:
    """The claim of this job on `folder`, into which it saves.

    `locked` says whether it keeps others out, which not every file system can.
    """

    folder: Path
    locked: bool
    _lock: _Lock | None

    def holds(self) -> bool:
        """Whether it still stands: the folder may have been removed since."""
        return self._lock is None or self._lock.holds()

    def release(self) -> None:
        """Let others have the folder. May be called again."""
        lock, self._lock = self._lock, None
        if lock is None or lock.process != os.getpid():  # a forked process has not got it
            return
        with _mutex:
            lock.claims -= 1
            if lock.claims:
                return
            if _locks.get(lock.path) is lock:
                del _locks[lock.path]
            # Removed before it is unlocked: else another job could lock a file that then goes.
            if lock.holds():
                lock.path.unlink(missing_ok=True)
            os.close(lock.fd)


def take(folder: Path, patience: float | None = None) -> FolderClaim:
    """Claim `folder`, which is made where there is none.

    Raises FolderInUse where another job still has it after `patience` seconds (PATIENCE), OSError
    where no file can be made in it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    patience = PATIENCE if patience is None else patience
    deadline = time.monotonic() + patience
    while True:
        with _mutex:
            found = _try(folder)
        if isinstance(found, FolderClaim):
            return found
        if time.monotonic() >= deadline:
            raise FolderInUse(
                f"Another job saves into {folder}: {found}. Two would take each other's "
                "checkpoints. Give this one a folder of its own, or end that one; to look at what "
                f'it has saved, write engine.load("{folder}/step-N").'
            )
        time.sleep(PAUSE)


def _try(folder: Path) -> FolderClaim | str:
    """A claim, or who has the folder."""
    path = folder.resolve() / LOCK
    held = _locks.get(path)
    if held is not None and held.process == os.getpid() and held.holds():
        held.claims += 1
        return FolderClaim(folder, True, held)
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            # lockf and not flock, which NFS clients may keep to one host.
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            said = _name_in(fd)
            os.close(fd)
            if error.errno in _TAKEN:
                return said
            if error.errno in _UNKNOWN:
                return FolderClaim(folder, False, None)
            raise
        if _identity(path) != _identity(fd):  # its holder has removed it in that moment
            os.close(fd)
            continue
        lock = _locks[path] = _Lock(fd, path)
        _sign(fd)
        return FolderClaim(folder, True, lock)


def _identity(file: Path | int) -> tuple[int, int] | None:
    try:
        status = os.stat(file)
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


def _sign(fd: int) -> None:
    """Say in the file who holds it: for people."""
    name = {
        "script": sys.argv[0] if sys.argv else "",
        "process": os.getpid(),
        "host": socket.gethostname(),
        "since": datetime.now().isoformat(" ", "seconds"),
    }
    data = json.dumps(name).encode() + b"\n"
    try:
        os.pwrite(fd, data, 0)
        os.ftruncate(fd, len(data))
    except OSError:  # a full disk: the lock holds without a name
        os.ftruncate(fd, 0)


def _name_in(fd: int) -> str:
    try:
        told: dict[str, Any] = json.loads(os.pread(fd, 4096, 0))
        words = "{script} (process {process} on {host}, since {since})".format(**told)
    except (ValueError, TypeError, KeyError, AttributeError, IndexError):
        return "one that has not left its name"
    return printable(words[:300])
