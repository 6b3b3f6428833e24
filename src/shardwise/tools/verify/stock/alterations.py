"""Alters the ranks or the reference in one respect, to confirm a cause.

If the altered runs agree, the alteration has removed the cause of the difference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.distributed.nn.functional import all_reduce
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from shardwise.model.module_records import joined
from shardwise.tools.verify.outside import _named_models
from shardwise.tools.verify.stock import readers, zero_shards

NO_DROPOUT = {"dropout_p": 0.0}


def apply(wanted: Mapping[str, Any]) -> None:
    """Apply the alterations in `wanted` (values by name) for the lifetime of this process."""
    for name, value in wanted.items():
        _ALTERATIONS[name](value)


def _scale_gradients(factor: float) -> None:
    """Multiply every gradient by `factor` before it is clipped or used."""

    def scale(parameters: Sequence[Tensor]) -> None:
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    _before_use(scale)


def _scale_some_gradients(wanted: tuple[float, list[str]]) -> None:
    """Multiply some gradients before they are used. `wanted` is (factor, parameter names)."""
    factor, names = wanted

    def scale(parameters: Sequence[Tensor]) -> None:
        for parameter in _with_names(parameters, names):
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    _before_use(scale)


def _average_gradients(names: list[str]) -> None:
    """Average the gradients of the named parameters over all ranks before they are used."""

    def average(parameters: Sequence[Tensor]) -> None:
        size = readers.world_size()
        for parameter in _with_names(parameters, names) if size > 1 else ():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradient = readers.local(parameter.grad)
            torch.distributed.all_reduce(gradient)
            gradient.div_(size)

    _before_use(average)


def _share_gradients(names: list[str]) -> None:
    """Average the named parameters' gradients over the ranks that have them, before they are used.

    Ranks without a gradient receive this mean.
    """

    def share(parameters: Sequence[Tensor]) -> None:
        for parameter in _with_names(parameters, names) if readers.world_size() > 1 else ():
            count = torch.tensor(float(parameter.grad is not None))
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            torch.distributed.all_reduce(gradient)
            torch.distributed.all_reduce(count)
            parameter.grad = gradient.div_(count.item()) if count else None

    _before_use(share)


def _before_use(change: Callable[[Sequence[Tensor]], None]) -> None:
    """Call `change` with the parameters of each step, before their gradients are clipped.

    Without clipping, call it just before the optimizer step. `change` receives each parameter only
    once per step.
    """
    changed: set[int] = set()
    is_in_zero = False

    def change_zero(zero: Any) -> None:
        nonlocal is_in_zero
        is_in_zero = True
        # DeepSpeed clips inside of its step, before it calls the torch optimizer.
        change([SimpleNamespace(grad=each) for each in zero_shards.gradients(zero)])  # type: ignore[misc]

    def leave_zero(zero: Any) -> None:
        nonlocal is_in_zero
        is_in_zero = False

    def change_once(parameters: Sequence[Tensor]) -> None:
        if is_in_zero:
            return
        fresh = [parameter for parameter in parameters if id(parameter) not in changed]
        changed.update(map(id, fresh))
        change(fresh)

    plain: Callable[..., Any] = nn.utils.clip_grad.clip_grad_norm_

    @wraps(plain)
    def clipped(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        several = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        change_once(several)
        return plain(several, *args, **kwargs)

    for owner in (nn.utils.clip_grad, nn.utils):
        owner.clip_grad_norm_ = clipped  # type: ignore[attr-defined]
    register_optimizer_step_pre_hook(lambda optimizer, *_: change_once(_parameters(optimizer)))
    register_optimizer_step_post_hook(lambda *_: changed.clear())
    zero_shards.follow(change_zero, leave_zero)


def _clip_norms(norms: list[list[float]]) -> None:
    """Clip by the norms in `norms`, by step. A step with an empty list uses its own norm."""
    place = 0

    def count(*_: Any) -> None:
        nonlocal place
        place += 1

    def given(plain: Callable[..., Any], returns: bool) -> Callable[..., Any]:
        @wraps(plain)
        def clipped(parameters: Any, max_norm: float, *args: Any, **kwargs: Any) -> Any:
            norm = norms[place] if place < len(norms) else []
            if not norm:
                return plain(parameters, max_norm, *args, **kwargs)
            several = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            factor = min(1.0, float(max_norm) / (norm[0] + 1e-6))
            for parameter in several:
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
            return torch.tensor(norm[0]) if returns else None

        return clipped

    for name, returns in (("clip_grad_norm_", True), ("clip_grads_with_norm_", False)):
        clipped = given(getattr(nn.utils, name), returns)
        setattr(nn.utils, name, clipped)
        if returns:
            nn.utils.clip_grad.clip_grad_norm_ = clipped
    register_optimizer_step_post_hook(count)


def _scale_rates(factor: float) -> None:
    """Multiply each optimizer's learning rates by `factor` when the optimizer is created."""
    init: Callable[..., None] = optim.Optimizer.__init__

    @wraps(init)
    def scaled(optimizer: optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        init(optimizer, *args, **kwargs)
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * factor

    optim.Optimizer.__init__ = scaled  # type: ignore[method-assign, assignment]


def _rates(rates: list[list[float]]) -> None:
    """Override the learning rates with `rates`, by step and parameter group."""
    steps = iter(rates)

    def set_rates(optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
        for group, rate in zip(optimizer.param_groups, next(steps, ()), strict=False):
            group["lr"] = rate

    register_optimizer_step_pre_hook(set_rates)


def _loss_factors(factors: list[list[list[float]]]) -> None:
    """Multiply each loss by its factor just before its backward pass.

    `factors` is indexed by rank, step and backward pass.
    """
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


def _scale_term(wanted: tuple[int, float]) -> None:
    """Scale the gradient of one term in every loss that is a sum of two terms.

    `wanted` is the pair (index of the term, factor). The index is 0 or 1.
    """
    addend, factor = wanted
    backward: Callable[..., Any] = torch.autograd.backward
    inside = False

    @wraps(backward)
    def scaled(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal inside
        node = None if inside or not isinstance(tensors, Tensor) else tensors.grad_fn
        if node is None or type(node).__name__ != "AddBackward0":
            return backward(tensors, *args, **kwargs)
        inside = True
        term: Any = node.next_functions[addend][0]
        hook = term.register_prehook(lambda gradients: tuple(g * factor for g in gradients))
        try:
            return backward(tensors, *args, **kwargs)
        finally:
            hook.remove()
            inside = False

    torch.autograd.backward = scaled


def _no_dropout(value: None) -> None:
    """Disable dropout."""
    for name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout"):
        setattr(nn.functional, name, _identity)
    plain: Callable[..., Tensor] = nn.functional.scaled_dot_product_attention

    @wraps(plain)
    def attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        # The arguments after `value` are attn_mask and dropout_p.
        args = (*args[:1], 0.0, *args[2:]) if len(args) > 1 else args
        return plain(query, key, value, *args, **kwargs | ({} if len(args) > 1 else NO_DROPOUT))

    nn.functional.scaled_dot_product_attention = attention


def _identity(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return input


def _global_batch_norm(value: None) -> None:
    """Make BatchNorm normalise with the mean and variance of all ranks' rows."""
    plain: Callable[..., Tensor] = nn.functional.batch_norm

    @wraps(plain)
    def normalised(
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        if not training or readers.world_size() == 1:
            return plain(input, running_mean, running_var, weight, bias, training, momentum, eps)
        # input: (N, C, ...). Sums of values, of squares and of items, each by channel.
        others = [dim for dim in range(input.ndim) if dim != 1]
        items = input.new_full((input.shape[1],), input.numel() / input.shape[1])
        sums = torch.stack([input.sum(others), input.square().sum(others), items])
        first, second, count = all_reduce(sums)  # type: ignore[no-untyped-call]
        mean = first / count
        variance = second / count - mean.square()
        with torch.no_grad():
            if running_mean is not None and running_var is not None:
                running_mean.lerp_(mean, momentum)
                running_var.lerp_(variance * count / (count - 1), momentum)
        shape = [1, -1] + [1] * (input.ndim - 2)
        output: Tensor = (input - mean.view(shape)) * (variance + eps).rsqrt().view(shape)
        if weight is not None:
            output = output * weight.view(shape)
        if bias is not None:
            output = output + bias.view(shape)
        return output

    nn.functional.batch_norm = normalised


def _no_bf16(value: None) -> None:
    """Use the default dtype wherever the script requests bf16."""
    kinds: tuple[Any, ...] = (Tensor, nn.Module)
    for kind in kinds:
        plain_to: Callable[..., Any] = kind.to

        @wraps(plain_to)
        def to(each: Any, *args: Any, plain: Callable[..., Any] = plain_to, **kwargs: Any) -> Any:
            args = tuple(map(_wider, args))
            return plain(each, *args, **{key: _wider(word) for key, word in kwargs.items()})

        kind.to = to
        kind.bfloat16 = lambda each: each.to(torch.get_default_dtype())
    init: Callable[..., None] = torch.autocast.__init__

    @wraps(init)
    def disabled(cast: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        init(cast, device_type, enabled=False)

    torch.autocast.__init__ = disabled  # type: ignore[method-assign, assignment]


def _wider(value: Any) -> Any:
    return torch.get_default_dtype() if value is torch.bfloat16 else value


def _with_names(parameters: Sequence[Tensor], names: Sequence[str]) -> list[Tensor]:
    named = {
        readers.plain_name(joined(prefix, name)): parameter
        for prefix, model in _named_models(list(parameters))
        for name, parameter in model.named_parameters()
    }
    # All ranks reduce in the same order.
    return [named[name] for name in names if name in named]


def _parameters(optimizer: optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


_ALTERATIONS: dict[str, Callable[[Any], None]] = {
    "scale_gradients": _scale_gradients,
    "scale_some_gradients": _scale_some_gradients,
    "share_gradients": _share_gradients,
    "clip_norms": _clip_norms,
    "scale_term": _scale_term,
    "global_batch_norm": _global_batch_norm,
    "no_bf16": _no_bf16,
    "average_gradients": _average_gradients,
    "scale_rates": _scale_rates,
    "rates": _rates,
    "loss_factors": _loss_factors,
    "no_dropout": _no_dropout,
}
