"""Resident memory, and bytes moved to and from disks, as the kernel counts them, so that no
contender is believed.

Pss shares a page out among the processes that map it, so the sum over ranks counts memory that
they hold in common once. Pages of files (the libraries themselves) are left out: their share
depends on how many other processes run.
"""

from collections.abc import Iterable
from pathlib import Path

COUNTED = ("Pss_Anon:", "Pss_Shmem:")
MB = 1e6


def resident(pid: int | str) -> int | None:
    """Bytes of anonymous and shared memory of a process; None where it cannot be read."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return None
    counted = [line.split()[1] for line in lines if line.startswith(COUNTED)]
    return sum(map(int, counted)) * 1024 if len(counted) == len(COUNTED) else None


def own_memory() -> int | None:
    """`resident` of this process."""
    return resident("self")


def summed(pids: Iterable[int]) -> int | None:
    """The sum over processes; None where one cannot be read."""
    parts = [resident(pid) for pid in pids]
    return None if None in parts else sum(part for part in parts if part is not None)


def available() -> int | None:
    """Bytes that new processes can have without swapping; None where unknown."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(x.split()[1]) * 1024 for x in lines if x.startswith("MemAvailable:")), None)


def disk_bytes() -> int:
    """Bytes that this process has read from disks and written to them; 0 where unknown."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(x.split()[1]) for x in lines if x.startswith(("read_bytes:", "write_bytes:")))
