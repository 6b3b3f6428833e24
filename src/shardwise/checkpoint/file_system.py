"""Opens plain files only, writes small ones, and removes what is left of old checkpoints.

What is opened to be read is a regular file, so that nothing waits for the other end of a pipe, and
a folder in a file's place is told as that.

What is to be removed is tried, never insisted on: someone may have a file of it open (NFS keeps
that under a name of its own), or own the folder that a link leads to. The checkpoint that is being
saved does not depend on it.
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
    """A descriptor of the file `path`, or of what it links to.

    Raises OSError where it cannot be opened, BrokenCheckpoint where it is no file.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        os.close(fd)
        raise BrokenCheckpoint(
            f"{path} is {_KINDS.get(stat.S_IFMT(mode), 'something else')}, and a file belongs "
            "there. Bring the file back, or take another checkpoint."
        )
    return fd


def read_whole(path: Path) -> bytes:
    """All bytes of the file `path`. Raises as `open_to_read` does."""
    with open(open_to_read(path), "rb") as file:
        return file.read()


def must_be_file(path: Path) -> None:
    """Raise as `open_to_read` does, where something else opens the file by its name."""
    os.close(open_to_read(path))


def sync(folder: Path) -> None:
    """Return once the names in `folder` are on the disk."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_synced(path: Path, data: bytes) -> None:
    """Write `data` to the file `path`, and return once it is on the disk."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, data: bytes) -> None:
    """Replace the file `path` by one with `data`: whatever happens, one of the two is there."""
    aside = path.with_name(f".{path.name}.partial")
    try:
        write_synced(aside, data)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
    sync(path.parent)


def remove(path: Path) -> str | None:
    """Remove a folder with all that is in it, or a file, or a link but not what it leads to.

    Returns in words why it is still there.
    """
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        return not_removed(path, error)
    return None


def not_removed(path: Path, error: OSError) -> str:
    """In words, that `path` is still there."""
    return (
        f"{path} is to be removed and cannot be ({error.strerror or error}): the next save tries "
        "again."
    )


def gone_name(folder: Path, step: int | str) -> Path:
    """A free name in `folder` for what is left of a checkpoint of `step`."""
    first = f".step-{step}.gone"
    names = itertools.chain([first], (f"{first}.{number}" for number in itertools.count(1)))
    return next(folder / name for name in names if not os.path.lexists(folder / name))
