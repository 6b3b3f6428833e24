"""Implements deepspeed.checkpointing (activation checkpointing) with torch's own function."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as checkpoint_of_torch

from shardwise.config.deepspeed import parse

__all__ = ["checkpoint", "configure", "is_configured", "reset"]

_configured: dict[str, bool] = {}


def configure(
    mpu_: Any = None,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Set whether `checkpoint` stores its inputs in host memory.

    Args:
        checkpoint_in_cpu: Whether to do so (default: cpu_checkpointing in the config).
        deepspeed_config: The DeepSpeed config.

    The other arguments tune DeepSpeed's implementation and are ignored.
    """
    del mpu_, partition_activations, contiguous_checkpointing, num_checkpoints, synchronize, profile
    in_cpu = bool(checkpoint_in_cpu)
    if deepspeed_config is not None and checkpoint_in_cpu is None:
        document = parse(deepspeed_config).document
        in_cpu = bool(document.get("activation_checkpointing.cpu_checkpointing", False))
    _configured["in_cpu"] = in_cpu


def is_configured() -> bool:
    """Return whether `configure` has been called."""
    return bool(_configured)


def reset() -> None:
    """No-op, because no state is kept between forward passes."""


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """Return `function(*args)`.

    The backward pass runs `function` again instead of storing its activations.
    """
    kept = torch.autograd.graph.save_on_cpu() if _configured.get("in_cpu") else nullcontext()
    with kept:
        return checkpoint_of_torch(function, *args, use_reentrant=False)
