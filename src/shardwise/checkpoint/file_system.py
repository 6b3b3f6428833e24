"""File operations of checkpoints: open regular files, write small ones, remove old checkpoints.

Only regular files are opened for reading. A pipe would block until someone writes to it, and a
folder in the place of a file gets an error that says so.

A removal may fail, and the save succeeds anyway: another process may have a file open (NFS then
renames it instead of deleting it), or another user may own the folder that a link points to.
"""

from __future__ import annotations

import itertools
import os
import shutil
import stat
from pathlib import Path

from shardwise.errors import BrokenCheckpoint

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_to_read(path: Path) -> int:
    """Return a descriptor of the file `path`; links are followed.

    Raises OSError if it cannot be opened, BrokenCheckpoint if it is not a regular file.
    """
    # O_NONBLOCK: opening a pipe without a writer would block forever.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        os.close(fd)
        raise BrokenCheckpoint(
            f"{path} is {_KINDS.get(stat.S_IFMT(mode), 'something else')}, but must be a file. "
            "Restore the file, or use another checkpoint."
        )
    return fd


def read_whole(path: Path) -> bytes:
    """Return all bytes of the file `path`. Raises as `open_to_read` does."""
    with open(open_to_read(path), "rb") as file:
        return file.read()


def must_be_file(path: Path) -> None:
    """Raise as `open_to_read` does. For a file that a library opens by its name."""
    os.close(open_to_read(path))


def sync(folder: Path) -> None:
    """Return once the names in `folder` are on disk."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_synced(path: Path, data: bytes) -> None:
    """Write `data` to the file `path`, and return once it is on disk."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, data: bytes) -> None:
    """Replace the file `path` atomically: after a crash it has the old or the new content."""
    # In the same folder, because a rename is atomic only within one file system.
    aside = path.with_name(f".{path.name}.partial")
    try:
        write_synced(aside, data)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
    sync(path.parent)


def remove(path: Path) -> str | None:
    """Remove a folder with its contents, a file, or a link (but not its target).

    Returns None, or a message that says why the path could not be removed.
    """
    try:
        # A link to a folder is a folder too, but its target is not ours to remove.
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        return not_removed(path, error)
    return None


def not_removed(path: Path, error: OSError) -> str:
    """Return the message for a path that could not be removed."""
    return f"{path} could not be removed ({error.strerror or error}). The next save will try again."


def gone_name(folder: Path, step: int | str) -> Path:
    """Return an unused name in `folder` for the remains of the checkpoint of `step`."""
    first = f".step-{step}.gone"
    names = itertools.chain([first], (f"{first}.{number}" for number in itertools.count(1)))
    return next(folder / name for name in names if not os.path.lexists(folder / name))
