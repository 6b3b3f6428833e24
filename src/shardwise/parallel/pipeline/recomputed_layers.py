"""Checkpoints of the user's own (torch.utils.checkpoint) around layers of several stages.

What such a checkpoint runs again in backward would go along the line again: sent, received and
drawn anew, in the midst of another micro-batch. So each layer inside it is a checkpoint by itself,
whose recomputation stays on its stage, and the one around them has nothing left to run again.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from shardwise.errors import UsageError
from shardwise.model.recomputation import RecomputedForward
from shardwise.model.saved_tensors import Kept


def is_around() -> bool:
    """Whether what autograd saves now would go into a checkpoint, perhaps by way of others."""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    while hooks is not None:
        pack = hooks[0]
        if getattr(pack, "__module__", None) == checkpoint.__module__:
            return True
        hooks = getattr(getattr(pack, "__self__", None), "outer", None)
    return False


def kept() -> AbstractContextManager[Any]:
    """Inside the block what autograd saves is kept, also where a checkpoint is around it."""
    return saved_tensors_hooks(Kept, Kept.value) if is_around() else nullcontext()


def by_itself(plain: Callable[..., Any]) -> Callable[..., Any]:
    """`plain`, the forward of a layer; where a checkpoint is around it, as one of its own."""
    if not is_around():
        return plain

    def run(*args: Any, **kwargs: Any) -> Any:
        with saved_tensors_hooks(Kept, Kept.value):
            if isinstance(plain, RecomputedForward):
                return plain(*args, **kwargs)
            return checkpoint(plain, *args, use_reentrant=False, **kwargs)

    return run


def is_in_function() -> bool:
    """Whether this is the forward of a torch.autograd.Function, whose operations autograd does not
    record."""
    return not (torch._C._is_fwd_grad_enabled() or torch.is_inference_mode_enabled())


def function_refused() -> UsageError:
    """The error for such a forward of what takes gradients: those of other stages would get none
    from its backward."""
    return UsageError(
        "A tensor of a model whose layers are on several workers (--pipeline) went into a "
        "torch.autograd.Function, whose backward cannot be followed from worker to worker. Where "
        "that is checkpointing, write checkpoint(..., use_reentrant=False); else let a layer of "
        "the model call the function in its own forward, or start without --pipeline."
    )
