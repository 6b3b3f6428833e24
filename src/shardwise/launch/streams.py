"""Standard input and output as the command finds them: each may be closed."""

from __future__ import annotations

import os
import sys
from contextlib import suppress


def make_sure() -> str:
    """Let nothing else be opened in the place of a stream that is closed: a closed input is an
    empty one, and what goes to closed errors is lost.

    Returns, as a sentence, that the output is closed; "" where it is not.
    """
    closed = [fd for fd in (0, 1, 2) if not _is_open(fd)]
    for fd in closed:
        flags = os.O_RDONLY if fd == 0 else os.O_WRONLY
        opened = os.open(os.devnull, flags)
        if opened != fd:
            os.dup2(opened, fd)
            os.close(opened)
        os.set_inheritable(fd, True)
    if 2 in closed:
        sys.stderr = os.fdopen(2, "w", closefd=False)
    if 1 not in closed:
        return ""
    return (
        "standard output is closed, where ranks are to be heard: lead it to a file, or to "
        "/dev/null."
    )


def forget_unwritten() -> None:
    """What an output did not take is not tried again at the end of the process."""
    with suppress(OSError, ValueError, AttributeError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True
