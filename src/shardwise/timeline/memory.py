"""What this process takes of memory."""

from __future__ import annotations

import os
import resource
import sys
from typing import Any

MB = 1e6


def in_use() -> dict[str, float]:
    """Megabytes by name: the resident set, and what tensors hold of a device where there is one."""
    found = {"resident set": _resident() / MB}
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        found["device"] = torch.cuda.memory_allocated() / MB
    return found


def _resident() -> int:
    try:
        with open("/proc/self/statm", "rb") as table:
            return int(table.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # macOS has no such table: the most that it was so far, in bytes there
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
