"""Opens, writes and removes a checkpoint's files.

Only regular files are opened for reading. Opening a pipe would block until another process writes
to it, and for a folder, the error says that a file is needed.

A save succeeds even if old files cannot be removed. For example, another process may have a file
open (NFS then renames it instead of deleting it), or the folder may belong to another user.
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
    """Open the file `path` for reading and return its descriptor. Follows links.

    Raises OSError if the file cannot be opened, and BrokenCheckpoint if it is not a regular file.
    """
    # Use O_NONBLOCK, because opening a pipe without a writer would block forever.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        os.close(fd)
        raise BrokenCheckpoint(
            f"{path} is {_KINDS.get(stat.S_IFMT(mode), 'something else')}, not a file. Restore "
            "the file, or use another checkpoint."
        )
    return fd


def read_whole(path: Path) -> bytes:
    """Return the contents of the file `path`. Raises the errors of `open_to_read`."""
    with open(open_to_read(path), "rb") as file:
        return file.read()


def must_be_file(path: Path) -> None:
    """Check that `path` is a regular file. Called before a library opens the file.

    Raises the errors of `open_to_read`.
    """
    os.close(open_to_read(path))


def sync(folder: Path) -> None:
    """Flush the entries of `folder` (the names in it, not the files' contents) to disk."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_synced(path: Path, data: bytes) -> None:
    """Write `data` to the file `path` and flush it to disk."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, data: bytes) -> None:
    """Replace the file `path` atomically. After a crash, it has the old or the new contents."""
    # Write in the same folder, because a rename is atomic only within one file system.
    aside = path.with_name(f".{path.name}.partial")
    try:
        write_synced(aside, data)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
    sync(path.parent)


def remove(path: Path) -> str | None:
    """Remove a file, a link (but not its target), or a folder with its contents.

    Returns an error message if `path` could not be removed, and None otherwise.
    """
    try:
        # `is_dir` is also True for a link to a folder, whose contents must not be removed.
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        return not_removed(path, error)
    return None


def not_removed(path: Path, error: OSError) -> str:
    """Return a warning which says that `path` could not be removed."""
    return f"{path} could not be removed ({error.strerror or error}). The next save will try again."


def gone_name(folder: Path, step: int | str) -> Path:
    """Return an unused path in `folder`, for renaming a checkpoint of `step` before its removal."""
    first = f".step-{step}.gone"
    names = itertools.chain([first], (f"{first}.{number}" for number in itertools.count(1)))
    return next(folder / name for name in names if not os.path.lexists(folder / name))
