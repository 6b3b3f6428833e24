"""Allocates pages for direct transfers, and sets how much freed memory the C library keeps.

A training step frees memory that the next step allocates again. By default glibc returns the end of
its heap to the system once 64 MB of it are free, and the next step must then request new pages.
If each rank has a core to itself, this costs 5 % of a step (`benchmarks/step_time.py --config A`).

Large blocks should not stay in glibc's heap, though. torch requests aligned memory, so a freed
block is slightly too small for the next one of the same size, and would never be reused.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Mapping
from contextlib import suppress

import torch
from torch import Tensor

KEPT = 512 * 2**20
"""Number of free bytes at the end of the heap that the process keeps."""

MAPPED = 32 * 2**20
"""Minimum size in bytes of a block that gets its own mapping, which is returned to the system when
it is freed. glibc's own limit grows to this value with use, but stops adapting once the trim
threshold is set."""

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""The parameters M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of mallopt(3)."""

HUGE = 2 * 2**20
"""Size of a huge page in bytes."""

WIPEONFORK = 18
"""MADV_WIPEONFORK of Linux; Python's mmap module does not define it."""


def mapped(nbytes: int, *, wiped: bool = False) -> Tensor:
    """Allocate `nbytes` zeros (1-D, uint8) in a separate mapping, which is freed with the tensor.

    The memory is page-aligned. Allocations of at least one huge page are aligned to huge pages, and
    backed by huge pages if the kernel permits it. A direct transfer then pins one page instead of
    512, which was up to 1.7 times as fast when we measured it. If `wiped` is true, a forked process
    sees zeros instead of a copy.
    """
    # Allocate extra space to align the start. Do so only for large mappings, because the kernel may
    # back the extra space with huge pages, too.
    room = HUGE if nbytes >= HUGE else 0
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, max(nbytes + room, 1), flags=flags)
    first = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % HUGE if room else 0
    # A kernel that does not support this advice only loses speed.
    with suppress(OSError):
        if room:
            memory.madvise(mmap.MADV_HUGEPAGE, first, nbytes // HUGE * HUGE)
        if wiped:
            memory.madvise(WIPEONFORK)
    count = max(nbytes, 1)
    return torch.frombuffer(memory, dtype=torch.uint8, count=count, offset=first)[:nbytes]


def keep(environ: Mapping[str, str]) -> bool:
    """Configure glibc to keep the heap memory that a step frees. Return whether this was done.

    Does nothing with other C libraries, or if `environ` contains the user's own settings (see
    mallopt(3)).
    """
    has_settings = any(name.startswith("MALLOC_") for name in environ)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if has_settings or "glibc.malloc" in environ.get("GLIBC_TUNABLES", "") or mallopt is None:
        return False
    # Set the mmap threshold first. It is the one that glibc may reject (above half of its maximum
    # heap size); any trim threshold is accepted. So either both take effect or none does.
    return bool(mallopt(MMAP_THRESHOLD, MAPPED)) and bool(mallopt(TRIM_THRESHOLD, KEPT))


def trim() -> None:
    """Return the heap's free pages to the system, if the C library is glibc."""
    if (malloc_trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        malloc_trim(0)


PAGE = 4096
"""Alignment of direct transfers in bytes: of the memory, the file offset and the length."""


def padded(nbytes: int) -> int:
    """Round `nbytes` up to a multiple of the page size."""
    return -(-nbytes // PAGE) * PAGE
