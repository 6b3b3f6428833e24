"""Sends a heartbeat to the agents on other hosts every second while the launcher exists.

The heartbeat is a separate process. Therefore a launcher that is stopped (by Ctrl-Z, or because a
pager has stopped reading its output) is not mistaken for a lost one. The process writes a NUL byte
to each descriptor in its arguments. It exits when its standard input, a pipe from the launcher, is
closed.

It runs as a script, so this file must not import anything from the package.
"""

import os
import select
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

EVERY = 1.0
"""Seconds between two heartbeats."""


@contextmanager
def heartbeats(fds: Iterable[int]) -> Iterator[None]:
    """Context manager for a process that sends heartbeats to the descriptors in `fds`."""
    script, passed = Path(__file__), list(fds)
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", script.name, *map(str, passed)],
        cwd=script.parent,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=passed,
        start_new_session=True,
    )
    assert process.stdin is not None
    try:
        yield
    finally:
        process.stdin.close()
        process.kill()  # closing its input is not enough if the process is stopped (SIGSTOP)
        process.wait()


def beat(fds: Iterable[int]) -> None:
    """Every second, write to the descriptors that accept data, until standard input is closed."""
    # Standard input is a pipe from the launcher. It becomes readable when the launcher exits.
    alive = set(fds)
    while not select.select([0], [], [], EVERY)[0]:
        ready = select.select([], alive, [], 0)[1]
        alive -= {fd for fd in ready if not _write(fd)}


def _write(fd: int) -> bool:
    """Write a heartbeat. Return False if the other end is closed."""
    try:
        os.write(fd, b"\0")
    except BlockingIOError:  # the launcher has just filled the pipe, which proves that it is alive
        return True
    except BrokenPipeError:
        return False
    return True


if __name__ == "__main__":
    beat([int(word) for word in sys.argv[1:]])
