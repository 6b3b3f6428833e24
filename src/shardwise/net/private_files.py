"""Reads and writes files that only this user can have written, and only this user can read.

Names in the temporary folder can be known by other users of the host, who may put a link or a
file of their own there first. So what ranks leave there lies in a folder of the user's own, which
is believed only if nobody else may write to it; no link is followed.
"""

import os
import secrets
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from shardwise.errors import LaunchError


def folder_path() -> Path:
    """The folder of this user in the temporary folder, whether it is there or not."""
    return Path(tempfile.gettempdir()) / f"shardwise-{os.getuid()}"


def folder() -> Path:
    """The same, made where it is not there. Raises LaunchError where it is not this user's alone,
    or cannot be made."""
    found = folder_path()
    try:
        state = _made(found)
    except OSError as error:
        raise LaunchError(
            f"{found} cannot be made, where ranks find each other: {error.strerror}. Name another "
            "place for temporary files with TMPDIR=FOLDER."
        ) from None
    is_ours = stat.S_ISDIR(state.st_mode) and state.st_uid == os.getuid()
    if not is_ours or state.st_mode & 0o077:
        raise LaunchError(
            f"{found} is to be a folder of this user's alone (drwx------), but it is "
            f"{stat.filemode(state.st_mode)} of user {state.st_uid}. Remove it, or name another "
            "place for temporary files with TMPDIR=FOLDER."
        )
    return found


def _made(place: Path) -> os.stat_result:
    """What lstat says of a folder, made where it is not there: another run may remove it as empty
    between the two calls."""
    while True:
        with suppress(FileExistsError):
            place.mkdir(mode=0o700)
        with suppress(FileNotFoundError):
            return place.lstat()


def tidy() -> None:
    """Remove the folder where nothing is in it."""
    with suppress(OSError):
        folder_path().rmdir()


def create(place: Path) -> BinaryIO:
    """A new file for this user alone. Raises OSError, also where anything is there before it."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(place, flags, 0o600), "wb")


def write(place: Path, text: str, aside: str = ".writing-") -> None:
    """Put a text at `place`, whole or not at all, for this user alone. Raises OSError.

    Meanwhile it lies under a name of its own that starts with `aside`.
    """
    draft = place.with_name(f"{aside}{place.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        with _created(draft) as file:
            file.write(text.encode())
        draft.rename(place)
    finally:
        draft.unlink(missing_ok=True)


def _created(place: Path) -> BinaryIO:
    """`create`; where another run has just removed our own folder as empty, it is made again."""
    while True:
        try:
            return create(place)
        except FileNotFoundError:
            if place.parent != folder_path():
                raise
            folder()


def opened(place: Path) -> BinaryIO | None:
    """The file at `place` to be read, if nobody else can have left it there; None where there is
    none, or one that is not to be believed."""
    try:
        # A pipe in its place must not keep us waiting.
        fd = os.open(place, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:  # nothing is there, or a link, or what is not for us
        return None
    file = os.fdopen(fd, "rb")
    if _is_trusted(os.fstat(fd), place.parent.stat()):
        return file
    file.close()
    return None


def read(place: Path) -> str | None:
    """The text at `place`, as `opened` believes it."""
    file = opened(place)
    if file is None:
        return None
    with file:
        return file.read(1 << 20).decode(errors="replace")


def _is_trusted(found: os.stat_result, around: os.stat_result) -> bool:
    """Whether nobody else can have left the file: some network file systems rename owners, but in
    a folder that its owner alone may write to, there is nobody else."""
    for_others = around.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return stat.S_ISREG(found.st_mode) and (found.st_uid == os.getuid() or not for_others)


def commit_file(run: str) -> str:
    """The name of the file, in the folder of this user, that holds an elastic run's last commit."""
    return f"shardwise-commit-{run}"
