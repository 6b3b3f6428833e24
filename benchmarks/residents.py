"""Resident memory as the kernel counts it, so that no contender's own figure is believed.

Pss shares a page out among the processes that map it, so the sum over ranks counts shared memory
once. Pages of files (the libraries themselves) are left out: their share depends on how many other
processes run.
"""

from collections.abc import Iterable
from pathlib import Path

COUNTED = ("Pss_Anon:", "Pss_Shmem:")


def resident(pid: int | str = "self") -> int | None:
    """Return the bytes of anonymous and shared memory of a process; None if unknown."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return None
    counted = [line.split()[1] for line in lines if line.startswith(COUNTED)]
    return sum(map(int, counted)) * 1024 if len(counted) == len(COUNTED) else None


def summed(pids: Iterable[int]) -> int | None:
    """Return the sum over processes; None if one cannot be read."""
    parts = [resident(pid) for pid in pids]
    return None if None in parts else sum(part for part in parts if part is not None)


def available() -> int | None:
    """Return the bytes that new processes can have without swapping; None if unknown."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(x.split()[1]) * 1024 for x in lines if x.startswith("MemAvailable:")), None)
