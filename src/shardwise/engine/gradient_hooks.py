"""Refuses hooks on parameters that are not linear, if backward gives them a part of the gradient.

A hook of `parameter.register_hook` runs on every worker, on the gradient of that worker's rows.
The engine adds up what the hooks return. That is the result of one process if the hook is linear
(a mask, a factor), and another one if it is not: the sum of clamped parts is not the clamped sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, MutableMapping
from typing import Any

import torch
from torch import Tensor

from shardwise.errors import UsageError
from shardwise.messages.printable import from_here
from shardwise.states.parameters.named_parameters import NamedParameter
from shardwise.states.parameters.parameters_at_rest import unguarded
from shardwise.world.randomness import preserved

Hook = Callable[[Tensor], Tensor | None]


def watch(named: Iterable[NamedParameter]) -> None:
    """Let the next backward try each hook of these parameters that changes the gradient.

    Raises UsageError there, from the hook's place, for one that is not linear.
    """
    with unguarded():
        for each in named:
            hooks: MutableMapping[int, Hook] = each.parameter._backward_hooks or {}
            for key, hook in list(hooks.items()):
                hooks[key] = _Trial(each.name, hook, hooks, key)


class _Trial:
    """Stands in for a hook until it is given a gradient that is finite and not 0, and tries it
    then."""

    def __init__(self, name: str, hook: Hook, hooks: MutableMapping[int, Hook], key: int) -> None:
        self._name, self._hook = name, hook
        self._hooks, self._key = hooks, key

    def __call__(self, grad: Tensor) -> Tensor | None:
        given = self._hook(grad)
        # One that only reads is not called a second time: it may write a log.
        if given is None or given is grad or not grad.numel():
            self._hooks[self._key] = self._hook
            return given
        largest, made = torch.stack([grad.abs().max(), given.abs().max()]).double().tolist()
        if not (largest > 0 and math.isfinite(largest + made)):
            return given  # nothing to compare by: the next backward tries it
        self._hooks[self._key] = self._hook
        factor = _factor(max(largest, made), grad.dtype)
        with preserved():
            again: Any = self._hook(grad * factor)
        right = given.double() * factor
        limits = torch.finfo(given.dtype)
        # Numbers that are too small for all bits of a mantissa are rounded to multiples of this.
        rounding = 2 * limits.smallest_normal * limits.eps * max(abs(factor), 1.0)
        if isinstance(again, Tensor) and torch.allclose(
            again.double(), right, rtol=1e-2, atol=1e-3 * made * abs(factor) + rounding
        ):
            return given
        raise UsageError(
            f"A hook on {self._name} ({_place(self._hook)}) is not linear, and backward gives it "
            "the gradient of a part of the batch: what it makes of the parts does not add up to "
            "what it makes of the whole. Change the whole gradient instead, between "
            "engine.backward and engine.step: with engine.full_gradients(): p.grad.clamp_(...). "
            "To clip by the norm: engine.step(max_norm=...)."
        )


def _factor(largest: float, dtype: torch.dtype) -> float:
    """The factor of the trial of a gradient, where neither that nor what the hook makes of it has a
    number above `largest`.

    It is negative, so that abs() is found out, and large, so that clamping is, but within the range
    of `dtype`. Where that leaves no room for a large one it is small, which finds out clamping that
    has had an effect.
    """
    room = math.log2(torch.finfo(dtype).max / 8) - math.log2(largest)
    return -(2.0 ** (min(math.floor(room), 20) if room >= 2 else -4))


def _place(hook: Any) -> str:
    """Name `hook` by its file and line, as far as it has them."""
    code = getattr(getattr(hook, "__func__", hook), "__code__", None)
    return repr(hook) if code is None else f"{from_here(code.co_filename)}:{code.co_firstlineno}"
