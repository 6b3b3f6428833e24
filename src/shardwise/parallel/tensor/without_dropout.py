"""Replaces random numbers with fixed ones in forward passes.

This makes it possible to compare an unsplit module with its parts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_ops = torch.ops.aten

_FILLS: dict[Any, float] = {
    _ops.bernoulli: 1.0,
    _ops.bernoulli_: 1.0,
    _ops.rand: 0.25,
    _ops.rand_like: 0.25,
    _ops.uniform_: 0.25,
    _ops.randn: 0.5,
    _ops.randn_like: 0.5,
    _ops.normal_: 0.5,
    _ops.randint: 0.0,
    _ops.randint_like: 0.0,
    _ops.exponential_: 0.5,
}
"""The fixed result of each random operation."""


class SharedRandomness(Exception):
    """Raised if ranks would draw different numbers where the unsplit module draws just one."""


class WithoutRandomness(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context manager that replaces random numbers with fixed ones.

    `shapes` records the shapes of random tensors, in order. `whole` holds the shapes that the
    unsplit module has recorded. Inside a region (if `in_region` returns True), a random tensor of
    the same shape as in the unsplit module raises SharedRandomness: the unsplit module uses each
    number for all features (a dropped token), but every rank would draw a different number for its
    own features.
    """

    def __init__(
        self,
        whole: list[torch.Size] | None = None,
        in_region: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shapes: list[torch.Size] = []
        self._whole = whole
        self._in_region = in_region

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        # torch tags every operation that draws from a generator.
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        if func.overloadpacket is _ops.native_dropout:
            value, rate, train = args
            self._note(value.shape)
            mask = torch.ones_like(value, dtype=torch.bool)
            # Scale like dropout, but drop nothing.
            return (value / (1 - rate) if train and rate < 1 else value.clone()), mask
        fill = _FILLS.get(func.overloadpacket)
        if fill is None:
            return func(*args, **kwargs)
        in_place = func.overloadpacket.__name__.endswith("_")
        # Run the operation to get its shape and dtype, and replace its values with the fixed
        # number.
        result: Tensor = args[0] if in_place else func(*args, **kwargs)
        self._note(result.shape)
        return result.fill_(fill)

    def _note(self, shape: torch.Size) -> None:
        place = len(self.shapes)
        self.shapes.append(shape)
        whole = self._whole or []
        if self._in_region() and whole[place : place + 1] == [shape]:
            raise SharedRandomness
