"""Looks at the processes above and below this one in /proc. Elsewhere than on Linux finds none."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def ancestors(pid: int | None = None) -> Iterator[tuple[int, str]]:
    """Yield the number and the name of each process above `pid` (this process), nearest first.

    The kernel keeps 15 characters of a name. Ends at what cannot be seen.
    """
    with suppress(OSError):  # no /proc, or one that hides other users' processes
        above = stat(os.getpid() if pid is None else pid)[2]
        while above > 1:
            name, _, next_above, _ = stat(above)
            yield above, name
            above = next_above


def living_children(pid: int) -> int | None:
    """Count the processes that `pid` started and that still run; None where /proc does not tell."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return None
    return sum(_is_running(int(child)) for child in children)


def _is_running(pid: int) -> bool:
    try:
        return stat(pid)[1] not in "ZX"
    except OSError:  # it ended while we looked
        return False


def stat(pid: int) -> tuple[str, str, int, str]:
    """Return name, state, parent and start time (in ticks since boot) of a process.

    Raises OSError for a process that cannot be seen.
    """
    text = Path(f"/proc/{pid}/stat").read_text()
    name, _, rest = text.partition("(")[2].rpartition(")")
    fields = rest.split()
    return name, fields[0], int(fields[1]), fields[19]
