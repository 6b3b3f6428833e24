"""Finds a process's ancestors and children in /proc. Finds none on systems other than Linux."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def ancestors(pid: int | None = None) -> Iterator[tuple[int, str]]:
    """Yield the id and name of each ancestor of `pid` (default: this process), nearest first.

    The kernel truncates names to 15 characters. Stops at a process that is not visible.
    """
    with suppress(OSError):  # /proc is missing, or hides the processes of other users
        above = stat(os.getpid() if pid is None else pid)[2]
        while above > 1:
            name, _, next_above, _ = stat(above)
            yield above, name
            above = next_above


def living_children(pid: int) -> int | None:
    """Return the number of running children of `pid`, or None if /proc does not list them."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return None
    count = 0
    for child in children:
        with suppress(OSError):  # it has exited in the meantime
            count += stat(int(child))[1] not in "ZX"  # neither a zombie nor dead
    return count


def stat(pid: int) -> tuple[str, str, int, str]:
    """Return a process's name, state, parent and start time (in ticks since boot).

    Raises OSError if the process is not visible.
    """
    text = Path(f"/proc/{pid}/stat").read_text()
    # The name is enclosed in parentheses, and may contain parentheses itself.
    name, _, rest = text.partition("(")[2].rpartition(")")
    fields = rest.split()
    return name, fields[0], int(fields[1]), fields[19]
