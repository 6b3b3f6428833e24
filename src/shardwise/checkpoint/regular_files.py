"""Files that are opened to be read: plain ones only, so that nothing waits for the other end of a
pipe, and a folder in a file's place is told as that."""

from __future__ import annotations

import os
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
