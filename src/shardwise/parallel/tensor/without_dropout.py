"""Forwards without chance: what they draw is the same for whoever has the whole and for whoever has
a part, so that the two can be compared in training too."""

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
"""By operation what all of its numbers are instead."""


class SharedDraw(Exception):
    """A rank would draw for itself what is one draw in the whole."""


class Undrawn(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside of it nothing is drawn: each number is one and the same.

    `shapes` are those of what is drawn, in order; while `is_apart`, with those of the whole given
    as `whole`, a draw of the whole's shape raises SharedDraw: each rank has a part of the features
    and its own chance, and the draw would be one for all features (a token that is dropped).
    """

    def __init__(
        self,
        whole: list[torch.Size] | None = None,
        is_apart: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shapes: list[torch.Size] = []
        self._whole = whole
        self._is_apart = is_apart

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        if func.overloadpacket is _ops.native_dropout:
            value, rate, train = args
            self._note(value.shape)
            kept = torch.ones_like(value, dtype=torch.bool)
            return (value / (1 - rate) if train and rate < 1 else value.clone()), kept
        fill = _FILLS.get(func.overloadpacket)
        if fill is None:
            return func(*args, **kwargs)
        return self._filled(func, fill, args, kwargs)

    def _filled(self, func: Any, fill: float, args: tuple[Any, ...], kwargs: Any) -> Any:
        in_place = func.overloadpacket.__name__.endswith("_")
        made: Tensor = args[0] if in_place else func(*args, **kwargs)
        self._note(made.shape)
        return made.fill_(fill)

    def _note(self, shape: torch.Size) -> None:
        place = len(self.shapes)
        self.shapes.append(shape)
        whole = self._whole or []
        if self._is_apart() and whole[place : place + 1] == [shape]:
            raise SharedDraw
