"""The layers of one stage as one module, which the pipeline runs on that stage's workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True, eq=False)
class Place:
    """One place in the row of layers: its number, and what is called there. `module` is the one
    that has its parameters, None for a function."""

    number: int
    call: Callable[[Any], Any]
    module: nn.Module | None
    name: str
    """Its type."""


@dataclass
class Recomputing:
    """How many layers in a row are run again in backward as one; 0 for none."""

    interval: int
    function: Callable[..., Any]
    types: Sequence[str] | None
    """Types of layers that may be run again; None: all rows that have parameters."""

    def applies_to(self, row: Sequence[Place]) -> bool:
        """Whether the layers of `row` are run again."""
        if self.types is not None:
            return all(place.name in self.types for place in row)
        return any(
            place.module is not None and next(place.module.parameters(), None) is not None
            for place in row
        )


class Stage(nn.Module):
    """Runs `places` one after the other. A module that stands in several of them is one here."""

    def __init__(self, places: Sequence[Place], recomputing: Recomputing) -> None:
        super().__init__()
        self._places = places
        self._recomputing = recomputing
        for place in places:
            known = any(place.module is module for module in self.children())
            if place.module is not None and not known:
                self.add_module(str(place.number), place.module)

    def forward(self, x: Any) -> Any:
        """What the last layer makes of `x`, a tensor or a tuple of some."""
        length = self._recomputing.interval
        again = length > 0 and self.training and torch.is_grad_enabled()
        for row in _rows(self._places, length if again else len(self._places)):
            if again and self._recomputing.applies_to(row):
                given = x if isinstance(x, tuple) else (x,)
                x = self._recomputing.function(_chained(row), *given)
            else:
                x = _chained(row)(x)
        return x


def _rows(places: Sequence[Place], length: int) -> list[Sequence[Place]]:
    return [places[first : first + length] for first in range(0, len(places), length)]


def _chained(row: Sequence[Place]) -> Callable[..., Any]:
    """One layer of `row` after the other; several inputs are a tuple, as between layers."""

    def run(*inputs: Any) -> Any:
        x = inputs[0] if len(inputs) == 1 else inputs
        for place in row:
            x = place.call(x)
        return x

    return run
