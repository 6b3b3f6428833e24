"""Measures who else used the machine. A figure from a busy machine should say so."""

import time
from pathlib import Path
from resource import RUSAGE_CHILDREN, RUSAGE_SELF

from machine import cores, cpu_seconds

BUSY = 0.05
"""Share of the machine used by others above which figures are only indicative."""

# Columns of /proc/stat: user, nice, system, steal. Interrupts are left out: loopback traffic is
# our own.
COUNTED = (1, 2, 3, 8)
# Ticks per second: Linux reports this rate to user space, even if the kernel's own rate differs.
TICKS = 100.0


class Neighbours:
    """Watches from its creation on. Time of this process and of its children that have ended is
    our own."""

    def __init__(self) -> None:
        self._begun, self._all, self._ours = time.monotonic(), _all_seconds(), _our_seconds()

    def share(self) -> float | None:
        """Return the part of the cores' time that other processes used; None if unknown."""
        total = _all_seconds()
        if total is None or self._all is None:
            return None
        others = (total - self._all) - (_our_seconds() - self._ours)
        return max(others, 0.0) / ((time.monotonic() - self._begun) * cores())


def remark(share: float | None) -> str:
    """Return the sentence about other processes that stands below a table."""
    if share is None:
        return ""
    said = f"other processes took {share:.0%} of the machine"
    return said + (": too much, take these figures as indicative only" if share > BUSY else "")


def _all_seconds() -> float | None:
    try:
        fields = Path("/proc/stat").read_text().splitlines()[0].split()
    except OSError:
        return None
    return sum(int(fields[index]) for index in COUNTED) / TICKS


def _our_seconds() -> float:
    return cpu_seconds(RUSAGE_SELF, RUSAGE_CHILDREN)
