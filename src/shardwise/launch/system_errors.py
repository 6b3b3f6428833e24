"""What the operating system refuses the command line, as a sentence that says what to do."""

from __future__ import annotations

import errno
import os

HINTS = {
    errno.ENOSPC: "free some space on that disk",
    errno.EDQUOT: "free some of this user's quota",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f unlimited)",
    errno.EMFILE: "raise the limit on open files (ulimit -n), or start fewer ranks here",
    errno.ENFILE: "this host has too many files open: start fewer ranks here",
    errno.EAGAIN: "raise the limit on processes (ulimit -u), or start fewer ranks here",
    errno.ENOMEM: "start fewer ranks here, or raise the limit on memory (ulimit -v)",
    errno.EACCES: "check its permissions, or name another one",
    errno.EPERM: "check its permissions, or name another one",
    errno.EROFS: "name a place on a file system that may be written to",
    errno.ENAMETOOLONG: "give a shorter name",
    errno.ENOTDIR: "a part of its path is a file: name another place",
    errno.EISDIR: "it is a folder: name a file",
    errno.EEXIST: "it is there already: name another one",
    errno.ELOOP: "its links lead to each other: name another one",
    errno.ENOENT: "check that it exists",
}


def sentence(error: OSError) -> str:
    """What was refused, and what to do about it."""
    files = [str(name)[:200] for name in (error.filename, error.filename2) if name is not None]
    what = f"{' to '.join(files)}: " if files else ""
    hint = HINTS.get(error.errno or 0)
    why = error.strerror or str(error) or type(error).__name__
    return f"{what}{why}" + (f"; {hint}." if hint else ". Check that this place can be used.")


def folder_of_this_process() -> str | None:
    """The working folder; None where it has been removed."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None
