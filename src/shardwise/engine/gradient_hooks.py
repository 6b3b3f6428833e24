"""Rejects nonlinear hooks on parameters if a backward pass computes only part of the gradient.

A hook from `parameter.register_hook` runs on every worker, on the gradient of that worker's rows,
and the engine adds up the results. For a linear hook (a mask, a factor) the sum is the same as in a
single process. For a nonlinear hook it is different: a sum of clamped parts is not the clamped sum.
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
from shardwise.world.generator_states import preserved

Hook = Callable[[Tensor], Tensor | None]


def watch(named: Iterable[NamedParameter]) -> None:
    """Test the hooks on the parameters in `named` during the next backward pass.

    Hooks that only read the gradient are not tested. The backward pass raises UsageError if a hook
    is not linear.
    """
    with unguarded():
        for each in named:
            hooks: MutableMapping[int, Hook] = each.parameter._backward_hooks or {}
            for key, hook in list(hooks.items()):
                hooks[key] = _Trial(each.name, hook, hooks, key)


class _Trial:
    """Stands in for a hook until a finite, nonzero gradient has arrived to test the hook on."""

    def __init__(self, name: str, hook: Hook, hooks: MutableMapping[int, Hook], key: int) -> None:
        self._name, self._hook = name, hook
        self._hooks, self._key = hooks, key

    def __call__(self, grad: Tensor) -> Tensor | None:
        result = self._hook(grad)
        # Don't call a read-only hook a second time: it may write to a log.
        if result is None or result is grad or not grad.numel():
            self._hooks[self._key] = self._hook
            return result
        # Stack both numbers to synchronise with the device only once.
        largest_in, largest_out = (
            torch.stack([grad.abs().max(), result.abs().max()]).double().tolist()
        )
        if not (largest_in > 0 and math.isfinite(largest_in + largest_out)):
            return result  # nothing to compare: try again in the next backward pass
        self._hooks[self._key] = self._hook
        factor = _trial_factor(max(largest_in, largest_out), grad.dtype)
        # The hook may draw random numbers. Restore the generators, so that this extra call doesn't
        # change later draws.
        with preserved():
            scaled: Any = self._hook(grad * factor)
        expected = result.double() * factor
        limits = torch.finfo(result.dtype)
        # Subnormal numbers are rounded to multiples of smallest_normal * eps.
        rounding = 2 * limits.smallest_normal * limits.eps * max(abs(factor), 1.0)
        if isinstance(scaled, Tensor) and torch.allclose(
            scaled.double(), expected, rtol=1e-2, atol=1e-3 * largest_out * abs(factor) + rounding
        ):
            return result
        code = getattr(getattr(self._hook, "__func__", self._hook), "__code__", None)
        where = repr(self._hook)
        if code is not None:
            where = f"{from_here(code.co_filename)}:{code.co_firstlineno}"
        raise UsageError(
            f"A hook on {self._name} ({where}) is not linear, and backward calls it with the "
            "gradient of only a part of the batch. Its results for the parts do not add up to "
            "its result for the total batch. Change the complete gradient instead, between "
            "engine.backward and engine.step: with engine.full_gradients(): p.grad.clamp_(...). "
            "To clip by the norm: engine.step(max_norm=...)."
        )


def _trial_factor(largest: float, dtype: torch.dtype) -> float:
    """Return the factor by which a gradient is scaled to test a hook.

    `largest` is the largest absolute value in the gradient and in the hook's result. The factor is
    negative to expose abs(), and as large as `dtype` allows to expose clamping. If `largest` is too
    close to the maximum of `dtype`, the factor is small instead, which exposes clamping in the
    hook's first result.
    """
    room = math.log2(torch.finfo(dtype).max / 8) - math.log2(largest)
    return -(2.0 ** (min(math.floor(room), 20) if room >= 2 else -4))
