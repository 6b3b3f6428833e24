"""The state of a process of this host in words, from /proc."""

from __future__ import annotations

from pathlib import Path

WORDS = {
    "T": "stopped (T)",
    "t": "stopped by a debugger (t)",
    "Z": "ended",
    "X": "ended",
    "D": "waiting for a disk or the kernel (D)",
    "R": "running (R)",
    "S": "asleep (S)",
}
ENDED = "ended"
SILENT = (WORDS["T"], WORDS["t"], ENDED)
"""States in which nobody answers."""


def begun(pid: int | str = "self") -> int | None:
    """When a process began, in ticks since the boot, which tells it from a later one of its
    number; None where that cannot be read."""
    fields = _fields(pid)
    return int(fields[19]) if fields else None


def state(pid: int, since: int | None) -> str | None:
    """What the process that began at `since` does; None where nobody can tell."""
    if since is None:
        return None
    fields = _fields(pid)
    if not fields or int(fields[19]) != since:
        return ENDED
    return WORDS.get(fields[0], fields[0])


def _fields(pid: int | str) -> list[str]:
    """Those of /proc/PID/stat from the state on."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
