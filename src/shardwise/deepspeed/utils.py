"""Implements deepspeed.utils and deepspeed.runtime.utils: full tensors, logging, seeds, memory."""

from __future__ import annotations

import logging
import random
import resource
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

import shardwise as sw
from shardwise.deepspeed.accelerator import get_accelerator
from shardwise.deepspeed.engine import DeepSpeedEngine, engine_of
from shardwise.deepspeed.loader import RepeatingLoader
from shardwise.errors import UsageError

__all__ = [
    "RepeatingLoader",
    "instrument_w_nvtx",
    "log_dist",
    "logger",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "see_memory_usage",
    "set_random_seed",
    "set_z3_leaf_modules",
]

logger = logging.getLogger("shardwise.deepspeed")


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log a message on some ranks.

    Args:
        message: The text.
        ranks: The ranks that log it (default: all; -1 also means all).
        level: One of the levels of Python's logging module.
    """
    rank = sw.world().rank
    if not ranks or -1 in ranks or rank in ranks:
        logger.log(level, "[Rank %s] %s", rank, message)


def instrument_w_nvtx(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return `func` unchanged, because `--timeline` records times instead."""
    return func


def safe_get_full_fp32_param(param: Tensor) -> Tensor | None:
    """Return an fp32 copy of a full parameter. Collective.

    Returns:
        A tensor with the shape of the full parameter, or None if no engine trains the parameter.

    Raises:
        UsageError: If weights are bf16, because their fp32 masters are only in checkpoints.
    """
    engine = engine_of(param)
    if engine is None:
        return None
    inner = _without_masters(engine, "safe_get_full_fp32_param")
    with inner.full_parameters():
        return param.detach().float().clone()


def safe_set_full_fp32_param(param: Tensor, value: Tensor) -> None:
    """Set the full value of a parameter to rank 0's `value`. Collective.

    Raises:
        UsageError: If weights are bf16.
    """
    engine = engine_of(param)
    if engine is not None:
        inner = _without_masters(engine, "safe_set_full_fp32_param")
        with inner.full_parameters(write=True):
            param.data.copy_(value)


def _without_masters(engine: DeepSpeedEngine, call: str) -> sw.Engine:
    if engine.bfloat16_enabled():
        raise UsageError(
            f"{call} is not supported with bf16, because the fp32 masters are in the optimizer's "
            "state. Read them from a save_checkpoint, or the bf16 weights inside "
            "deepspeed.zero.GatheredParameters."
        )
    return engine._engine(call)


def safe_get_full_grad(param: Tensor) -> Tensor | None:
    """Return a copy of a parameter's full gradient, averaged across ranks. Collective.

    Call it between the last backward pass and the step.

    Returns:
        A tensor with the shape of the full parameter, or None if it has no gradient.
    """
    engine = engine_of(param)
    if engine is None:
        return None
    with engine._engine("safe_get_full_grad").full_gradients():
        return None if param.grad is None else param.grad.detach().clone()


def safe_set_full_grad(param: Tensor, value: Tensor) -> None:
    """Set a parameter's full gradient to rank 0's `value`. Collective.

    Call it between the last backward pass and the step.
    """
    engine = engine_of(param)
    if engine is not None:
        with engine._engine("safe_set_full_grad").full_gradients():
            if param.grad is not None:
                param.grad.copy_(value)


def safe_get_full_optimizer_state(param: Tensor, optim_state_key: str) -> Tensor | None:
    """Return a parameter's full optimizer state. Collective.

    This gathers the optimizer's entire state.

    Args:
        param: The parameter.
        optim_state_key: The name of the state, such as "exp_avg".

    Returns:
        The state as a tensor, or None if it does not exist.
    """
    engine = engine_of(param)
    if engine is None:
        return None
    inner = engine._engine("safe_get_full_optimizer_state")
    found: Tensor | None = None
    for optimizer in engine._parts.optimizers:
        state = inner.optimizer_state_dict(optimizer)["state"]
        held = [p for group in optimizer.param_groups for p in group["params"]]
        for number, each in enumerate(held):
            if each is param and number in state:
                found = state[number].get(optim_state_key)
    return None if found is None else torch.as_tensor(found)


def set_z3_leaf_modules(model: torch.nn.Module, leaf_module_classes: Sequence[Any]) -> list[Any]:
    """Return the modules in `model` that have the given classes, without changing anything.

    A mixture of experts is already a single unit, and `--units` selects other units.
    """
    return [each for each in model.modules() if type(each) in tuple(leaf_module_classes)]


def set_random_seed(seed: int) -> None:
    """Seed the generators of random, numpy and torch."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def see_memory_usage(message: str, force: bool = False) -> None:
    """If `force` is true, log a message and the memory usage in GB on rank 0.

    It logs current and peak GPU tensor memory, and this process's peak resident memory.
    """
    if not force:
        return
    accelerator = get_accelerator()
    now, most = accelerator.memory_allocated(), accelerator.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in bytes on macOS, else in KiB
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    log_dist(
        f"{message}: allocated {now / 1e9:.2f} GB, at most {most / 1e9:.2f} GB; "
        f"resident at most {resident / 1e9:.2f} GB",
        ranks=[0],
        level=logging.WARNING,
    )
