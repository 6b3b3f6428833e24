"""Tells the agents on other hosts every second that their launcher is alive.

The heartbeat is a separate process, so that a stopped launcher (Ctrl-Z, or a pager that does not
read) does not look like a lost host. It writes a NUL byte to each descriptor in its arguments, and
ends when its standard input ends, which the launcher holds.

It runs as a script, so this file imports nothing of the package.
"""

import os
import select
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

EVERY = 1.0
"""Seconds between two signs of life."""


@contextmanager
def heartbeats(fds: Iterable[int]) -> Iterator[None]:
    """Run a heartbeat process that writes to `fds` during the block."""
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
        process.kill()  # the end of its input is not enough: somebody may have stopped it
        process.wait()


def beat(fds: Iterable[int]) -> None:
    """Write to each writable one of `fds` every second, until standard input ends."""
    # Standard input is a pipe from the launcher: it becomes readable when the launcher ends.
    alive = set(fds)
    while not select.select([0], [], [], EVERY)[0]:
        ready = select.select([], alive, [], 0)[1]
        alive -= {fd for fd in ready if not _write(fd)}


def _write(fd: int) -> bool:
    """Write a beat. Return whether the other end is still open."""
    try:
        os.write(fd, b"\0")
    except BlockingIOError:  # the launcher has just filled the pipe, which is a sign of life too
        return True
    except BrokenPipeError:
        return False
    return True


if __name__ == "__main__":
    beat([int(word) for word in sys.argv[1:]])
