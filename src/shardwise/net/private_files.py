"""Reads and writes files that other users can neither read nor create.

Other users of the host can guess names in the temporary folder, and create a link or a file there
first. Ranks therefore use a subfolder that belongs to the user. It is trusted only if no other user
may write to it. Links are never followed.
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
    """Return the path of this user's subfolder in the temporary folder. It may not exist."""
    return Path(tempfile.gettempdir()) / f"shardwise-{os.getuid()}"


def folder() -> Path:
    """Return this user's subfolder in the temporary folder, creating it if it is missing.

    Raises LaunchError if it cannot be created, or if other users may access it.
    """
    found = folder_path()
    try:
        # Another run may remove the empty folder between mkdir and lstat, so try again.
        state: os.stat_result | None = None
        while state is None:
            with suppress(FileExistsError):
                found.mkdir(mode=0o700)
            with suppress(FileNotFoundError):
                state = found.lstat()
    except OSError as error:
        raise LaunchError(
            f"{found}, where ranks find each other, cannot be created: {error.strerror}. Name "
            "another place for temporary files with TMPDIR=FOLDER."
        ) from None
    is_ours = stat.S_ISDIR(state.st_mode) and state.st_uid == os.getuid()
    if not is_ours or state.st_mode & 0o077:
        raise LaunchError(
            f"{found} must be a folder that only this user can access (drwx------), but it is "
            f"{stat.filemode(state.st_mode)} of user {state.st_uid}. Remove it, or name another "
            "place for temporary files with TMPDIR=FOLDER."
        )
    return found


def tidy() -> None:
    """Remove this user's folder if it is empty."""
    with suppress(OSError):
        folder_path().rmdir()


def create(place: Path) -> BinaryIO:
    """Create a file that only this user can read. Raises OSError if that fails or it exists."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(place, flags, 0o600), "wb")


def write(place: Path, text: str, aside: str = ".writing-") -> None:
    """Write `text` to `place` atomically, readable only by this user. Raise OSError on failure.

    The text is first written to a file whose name starts with `aside`, which is then renamed.
    """
    draft = place.with_name(f"{aside}{place.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        with _create_in_folder(draft) as file:
            file.write(text.encode())
        draft.rename(place)
    finally:
        draft.unlink(missing_ok=True)


def _create_in_folder(place: Path) -> BinaryIO:
    """Create the file `place`, and its folder too if another run has just removed it."""
    while True:
        try:
            return create(place)
        except FileNotFoundError:
            if place.parent != folder_path():
                raise
            folder()


def opened(place: Path) -> BinaryIO | None:
    """Open the file at `place` for reading.

    Returns None if the file is missing, or if another user could have created it.
    """
    try:
        # O_NONBLOCK: opening a pipe that someone put there must not block.
        fd = os.open(place, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:  # missing, a link, or not readable
        return None
    file = os.fdopen(fd, "rb")
    found, around = os.fstat(fd), place.parent.stat()
    # Some network file systems report a different owner. Such a file is safe if only the folder's
    # owner may write to the folder.
    for_others = around.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if stat.S_ISREG(found.st_mode) and (found.st_uid == os.getuid() or not for_others):
        return file
    file.close()
    return None


def read(place: Path) -> str | None:
    """Return the text of the file at `place`.

    Returns None if the file is missing, or if another user could have created it.
    """
    file = opened(place)
    if file is None:
        return None
    with file:
        return file.read(1 << 20).decode(errors="replace")


def commit_file(run: str) -> str:
    """Return the name of the file that holds the elastic run `run`'s last commit."""
    return f"shardwise-commit-{run}"
