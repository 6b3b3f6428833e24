"""Handles the user's own checkpoints (torch.utils.checkpoint) around layers of several stages.

A recomputation of such a checkpoint would run the pipeline again: it would send, receive and draw
anew in the middle of another micro-batch. So each layer inside it becomes a checkpoint by itself,
whose recomputation stays on its stage, and the outer one has nothing left to run again.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from shardwise.errors import UsageError
from shardwise.model.activation_offload import Kept
from shardwise.model.recomputation import RecomputedForward


def in_checkpoint() -> bool:
    """Whether tensors that autograd saves now would go into a checkpoint, directly or through
    others."""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    while hooks is not None:
        pack = hooks[0]
        if getattr(pack, "__module__", None) == checkpoint.__module__:
            return True
        hooks = getattr(getattr(pack, "__self__", None), "outer", None)
    return False


def saved_outside_checkpoint() -> AbstractContextManager[Any]:
    """Save tensors for backward as they are inside the block, even within a checkpoint."""
    return saved_tensors_hooks(Kept, Kept.value) if in_checkpoint() else nullcontext()


def checkpoint_alone(original: Callable[..., Any]) -> Callable[..., Any]:
    """The forward `original` of a layer; inside a checkpoint, as a checkpoint of its own."""
    # Outside of a checkpoint nothing is recomputed, so the layer stays as it is.
    if not in_checkpoint():
        return original

    def run(*args: Any, **kwargs: Any) -> Any:
        # Around the layer, what the outer checkpoint's hooks would see is kept instead: they find
        # nothing to recompute.
        with saved_tensors_hooks(Kept, Kept.value):
            if isinstance(original, RecomputedForward):
                return original(*args, **kwargs)
            return checkpoint(original, *args, use_reentrant=False, **kwargs)

    return run


def in_autograd_function() -> bool:
    """Return whether this is the forward of a torch.autograd.Function."""
    # There torch turns off forward-mode gradients too, which torch.no_grad() leaves on.
    return not (torch._C._is_fwd_grad_enabled() or torch.is_inference_mode_enabled())


def autograd_function_error() -> UsageError:
    """The error for a tensor with gradients in such a forward: its backward would give none to
    other stages."""
    return UsageError(
        "A tensor of a model whose layers are on several workers (--pipeline) went into a "
        "torch.autograd.Function, whose backward cannot be followed from worker to worker. Where "
        "that is checkpointing, write checkpoint(..., use_reentrant=False); else let a layer of "
        "the model call the function in its own forward, or start without --pipeline."
    )
