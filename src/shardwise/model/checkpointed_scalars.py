"""Keeps the 0-dim tensors that autograd saves inside torch.utils.checkpoint regions.

A checkpoint with `use_reentrant=False` saves a placeholder instead of each tensor, and recomputes
all tensors in the backward pass. The number of labels of a cross_entropy is needed earlier. It is a
0-dim tensor, so the placeholder keeps it as an attribute.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch.utils.checkpoint
from torch import Tensor

_SCALAR = "_shardwise_scalar"


def keep() -> None:
    """Make checkpoints keep 0-dim tensors from now on. Further calls do nothing."""
    # torch has no public hook for this. Without its private class, such losses are weighted by
    # rows, and a message says so.
    hook: Any = getattr(torch.utils.checkpoint, "_checkpoint_hook", None)
    if hook is None or hasattr(hook, _SCALAR):
        return

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        hook.__init__(self, *args, **kwargs)
        self.pack_hook = _keeping(self.pack_hook)

    kept = type(hook.__name__, (hook,), {"__init__": init, _SCALAR: True})
    vars(torch.utils.checkpoint)["_checkpoint_hook"] = kept


def kept_in(placeholder: Any) -> Tensor | None:
    """Return the 0-dim tensor that `placeholder` stands for, or None if it was not kept."""
    return getattr(placeholder, _SCALAR, None)


def _keeping(pack: Any) -> Any:
    @wraps(pack)  # a hook's module tells other code that it belongs to a checkpoint
    def pack_and_keep(tensor: Tensor) -> Any:
        placeholder = pack(tensor)
        # A view would keep its whole storage alive, which may be large.
        if tensor.dim() == 0 and not tensor._is_view():
            setattr(placeholder, _SCALAR, tensor.detach())
        return placeholder

    return pack_and_keep
