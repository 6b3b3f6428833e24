"""Handles users' torch.utils.checkpoint calls around layers of several stages.

Recomputing such a checkpoint would run the pipeline again: it would send, receive and draw random
numbers in the middle of another micro-batch. Each layer inside the checkpoint is therefore
checkpointed separately and recomputed on its own stage, so the outer checkpoint has nothing left to
recompute.
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
    """Return whether a checkpoint would handle tensors that autograd saves now.

    It would if a checkpoint's saved-tensor hooks are active, even below other hooks.
    """
    # Saved-tensor hooks form a stack. Our own hooks store the hooks below them in `outer`.
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    while hooks is not None:
        pack = hooks[0]
        if getattr(pack, "__module__", None) == checkpoint.__module__:
            return True
        hooks = getattr(getattr(pack, "__self__", None), "outer", None)
    return False


def saved_outside_checkpoint() -> AbstractContextManager[Any]:
    """Context manager in which autograd itself keeps saved tensors, even in a checkpoint."""
    return saved_tensors_hooks(Kept, Kept.value) if in_checkpoint() else nullcontext()


def checkpoint_alone(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a layer's `forward` so that a call inside a checkpoint is checkpointed separately."""
    # Outside a checkpoint nothing is recomputed, so leave the layer unchanged.
    if not in_checkpoint():
        return original

    def run(*args: Any, **kwargs: Any) -> Any:
        # These hooks keep the tensors that are saved around the layer. The outer checkpoint's hooks
        # would drop and recompute them.
        with saved_tensors_hooks(Kept, Kept.value):
            if isinstance(original, RecomputedForward):
                return original(*args, **kwargs)
            return checkpoint(original, *args, use_reentrant=False, **kwargs)

    return run


def in_autograd_function() -> bool:
    """Return whether the `forward` of a torch.autograd.Function is running."""
    # torch disables forward-mode gradients there, but not in torch.no_grad().
    return not (torch._C._is_fwd_grad_enabled() or torch.is_inference_mode_enabled())


def autograd_function_error() -> UsageError:
    """Return the error to raise if a stage tensor with gradients is passed to an autograd function.

    The function's `backward` would not send gradients to the other stages.
    """
    return UsageError(
        "A tensor of a model whose layers are on several workers (--pipeline) went into a "
        "torch.autograd.Function, whose backward cannot reach the other workers. If this is "
        "checkpointing, write checkpoint(..., use_reentrant=False). Otherwise call the function "
        "in the forward of one of the model's layers, or start without --pipeline."
    )
