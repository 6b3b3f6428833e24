"""Tells the agents on other hosts, every second, that their launcher is alive.

A process of its own, so that a launcher that stands still (Ctrl-Z, a pager that reads no further)
does not look like one whose host is cut off. It writes a NUL byte to each descriptor given as an
argument; it ends with its standard input, which the launcher holds.

It is started as a script; so it imports nothing of the package.
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
    """Let a process of its own write to `fds` while the block runs."""
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
        process.kill()  # not by the end of its input: someone may have stopped it
        process.wait()


def beat(fds: Iterable[int]) -> None:
    """Write to each of `fds` that can take it, until nothing holds our standard input."""
    alive = set(fds)
    while not select.select([0], [], [], EVERY)[0]:
        ready = select.select([], alive, [], 0)[1]
        alive -= {fd for fd in ready if not _write(fd)}


def _write(fd: int) -> bool:
    """Whether there is still someone at the other end."""
    try:
        os.write(fd, b"\0")
    except BlockingIOError:  # the launcher has just filled the pipe: that is a sign of life too
        return True
    except BrokenPipeError:
        return False
    return True


if __name__ == "__main__":
    beat([int(word) for word in sys.argv[1:]])
