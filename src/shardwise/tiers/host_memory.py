"""Host memory: pages for direct transfers, and which freed memory the C library keeps.

A training step frees what the next one asks for again. Left to itself glibc returns the end of its
heap to the system when 64 MB of it are free, and the next step pays for every page anew: 5 % of a
step where a rank has a core to itself (`benchmarks/step_time.py --config A`).

What is used once it would keep too, in vain: as torch asks for aligned memory, a block that was
freed is a little too small for the next one of its own size.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Mapping
from contextlib import suppress

import torch
from torch import Tensor

KEPT = 512 * 2**20
"""Bytes at the end of the heap that stay with the process when they are free."""

MAPPED = 32 * 2**20
"""Bytes from which a block is a mapping of its own, returned when it is freed: glibc's own limit
after some use, which it forgets when told what to keep."""

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""What glibc's mallopt calls the two; see mallopt(3)."""

HUGE = 2 * 2**20
"""Bytes of a huge page."""

WIPEONFORK = 18
"""MADV_WIPEONFORK of Linux; Python's mmap module has no name for it."""


def mapped(nbytes: int, *, wiped: bool = False) -> Tensor:
    """`nbytes` zeros (1-D, uint8) in a mapping of their own, unmapped when the tensor goes.

    They start on a page. Where they fill a huge page they start on one, and consist of them if
    the kernel grants it: a direct transfer then pins one page where it would pin 512, which here
    makes it up to 1.7 times as fast. `wiped`: a forked process finds zeros in place of copies.
    """
    # Room to move the start only where it is needed: the kernel may fill it with huge pages.
    room = HUGE if nbytes >= HUGE else 0
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, max(nbytes + room, 1), flags=flags)
    first = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % HUGE if room else 0
    # Advice only: a kernel that does not know it loses speed, not bytes.
    with suppress(OSError):
        if room:
            memory.madvise(mmap.MADV_HUGEPAGE, first, nbytes // HUGE * HUGE)
        if wiped:
            memory.madvise(WIPEONFORK)
    count = max(nbytes, 1)
    return torch.frombuffer(memory, dtype=torch.uint8, count=count, offset=first)[:nbytes]


def keep(environ: Mapping[str, str]) -> bool:
    """Let the heap keep what a step frees, where the C library is glibc; returns whether it will.

    What the user has said about it in the environment, as mallopt(3) tells, stays as it is.
    """
    said = any(name.startswith("MALLOC_") for name in environ)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if said or "glibc.malloc" in environ.get("GLIBC_TUNABLES", "") or mallopt is None:
        return False
    return bool(mallopt(MMAP_THRESHOLD, MAPPED)) and bool(mallopt(TRIM_THRESHOLD, KEPT))


def trim() -> None:
    """Return the heap's free pages to the system, if the C library is glibc."""
    if (malloc_trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        malloc_trim(0)


PAGE = 4096
"""Bytes that direct transfers are aligned to: in memory, in the file and in length."""


def padded(nbytes: int) -> int:
    """`nbytes` rounded up to whole pages."""
    return -(-nbytes // PAGE) * PAGE
