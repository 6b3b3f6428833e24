"""Changes one thing about a rank or the reference, to confirm a cause.

If the runs agree with the change, the change takes away the cause of the difference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardwise.tools.verify.stock import readers


def apply(wanted: Mapping[str, Any]) -> None:
    """Apply alterations by name, for the time of this process."""
    for name, value in wanted.items():
        _ALTERATIONS[name](value)


def _scale_gradients(factor: float) -> None:
    """Multiply every gradient by `factor` before an optimizer uses it."""

    def scale(optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
        for parameter in _parameters(optimizer):
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    register_optimizer_step_pre_hook(scale)


def _average_gradients(groups: None) -> None:
    """Average every gradient over all ranks before an optimizer uses it."""

    def average(optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
        size = readers.world_size()
        for parameter in _parameters(optimizer) if size > 1 else ():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            torch.distributed.all_reduce(parameter.grad)
            parameter.grad.div_(size)

    register_optimizer_step_pre_hook(average)


def _scale_rates(factor: float) -> None:
    """Multiply the learning rates of each optimizer by `factor` when it is made."""
    init: Callable[..., None] = optim.Optimizer.__init__

    @wraps(init)
    def scaled(optimizer: optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        init(optimizer, *args, **kwargs)
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * factor

    optim.Optimizer.__init__ = scaled  # type: ignore[method-assign, assignment]


def _rates(rates: list[list[float]]) -> None:
    """Use the given learning rates, by step and parameter group."""
    steps = iter(rates)

    def set_rates(optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
        for group, rate in zip(optimizer.param_groups, next(steps, ()), strict=False):
            group["lr"] = rate

    register_optimizer_step_pre_hook(set_rates)


def _loss_factors(factors: list[list[list[float]]]) -> None:
    """Multiply each loss by its factor, by rank, step and backward, before its backward."""
    rank = readers.rank() if len(factors) > 1 else 0
    flat = iter([factor for step in factors[rank] for factor in step])
    backward: Callable[..., Any] = torch.autograd.backward
    inside = False

    @wraps(backward)
    def scaled(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal inside
        if inside or not isinstance(tensors, Tensor) or tensors.numel() > 1:
            return backward(tensors, *args, **kwargs)
        inside = True
        try:
            return backward(tensors * next(flat, 1.0), *args, **kwargs)
        finally:
            inside = False

    torch.autograd.backward = scaled


def _no_dropout(value: None) -> None:
    """Let dropout pass its input through."""
    for name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout"):
        setattr(nn.functional, name, _identity)


def _identity(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return input


def _parameters(optimizer: optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


_ALTERATIONS: dict[str, Callable[[Any], None]] = {
    "scale_gradients": _scale_gradients,
    "average_gradients": _average_gradients,
    "scale_rates": _scale_rates,
    "rates": _rates,
    "loss_factors": _loss_factors,
    "no_dropout": _no_dropout,
}
