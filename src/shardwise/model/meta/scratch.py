"""Memory that is needed for a moment, and then is the system's again.

Otherwise a model would be built in as much memory as if all that led to it were kept.
"""

from __future__ import annotations

import torch
from torch import UntypedStorage

from shardwise.tiers.heap import mapped, trim

_MAPPED = 2**20  # bytes from which a storage is worth a mapping of its own
_TRIMMED = 2**26  # bytes freed after which looking for them is worth the while

_freed = 0


def new_storage(size: int, device: torch.device) -> UntypedStorage:
    """A storage of `size` bytes, not initialised; a large one leaves no hole when it is freed."""
    if device.type == "cpu" and size >= _MAPPED:
        return mapped(size).untyped_storage()
    storage: UntypedStorage = UntypedStorage(size, device=device)  # type: ignore[no-untyped-call]
    return storage


def give_back(size: int) -> None:
    """Tell that `size` bytes of tensors were or will soon be freed; now and then, trim the heap."""
    global _freed
    _freed += size
    if _freed >= _TRIMMED:
        _freed = 0
        trim()
