"""Finds the processes above and below this one in /proc. Finds none on systems other than Linux."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def ancestors(pid: int | None = None) -> Iterator[tuple[int, str]]:
    """Yield the id and the name of each ancestor of `pid` (default: this process), nearest first.

    Names are cut to 15 characters by the kernel. Stops at a process that is not visible.
    """
    with suppress(OSError):  # /proc is missing, or hides the processes of other users
        above = stat(os.getpid() if pid is None else pid)[2]
        while above > 1:
            name, _, next_above, _ = stat(above)
            yield above, name
            above = next_above


def living_children(pid: int) -> int | None:
    """Count the running children of `pid`; None if /proc does not list them."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return None
    count = 0
    for child in children:
        with suppress(OSError):  # it has ended meanwhile
            count += stat(int(child))[1] not in "ZX"  # neither a zombie nor dead
    return count


def stat(pid: int) -> tuple[str, str, int, str]:
    """Return name, state, parent and start time (in ticks since boot) of a process.

    Raises OSError if the process is not visible.
    """
    text = Path(f"/proc/{pid}/stat").read_text()
    # The name stands in parentheses, and may contain some itself.
    name, _, rest = text.partition("(")[2].rpartition(")")
    fields = rest.split()
    return name, fields[0], int(fields[1]), fields[19]
