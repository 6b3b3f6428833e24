"""Layers that are built later (LayerSpec, TiedLayerSpec), and the stages that run them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardwise.errors import UsageError


class LayerSpec:
    """A layer: `typename`, a class of modules, and the arguments that it is built with."""

    def __init__(self, typename: type[nn.Module], *module_args: Any, **module_kwargs: Any) -> None:
        if not (isinstance(typename, type) and issubclass(typename, nn.Module)):
            raise UsageError(f"LayerSpec takes a class of torch.nn.Module, not {typename!r}.")
        self.typename = typename
        self.module_args = module_args
        self.module_kwargs = module_kwargs

    def build(self, log: bool = False) -> nn.Module:
        """Return a new module."""
        del log
        return self.typename(*self.module_args, **self.module_kwargs)

    def __repr__(self) -> str:
        words = [*map(repr, self.module_args)]
        words += [f"{name}={value!r}" for name, value in self.module_kwargs.items()]
        return f"{self.typename.__name__}({', '.join(words)})"


class TiedLayerSpec(LayerSpec):
    """A layer whose module, built once, stands in every place with the same `key`.

    There it is called as it is, or as `forward_fn(module, input)`. All of its parameters are one in
    all places: what `tied_weight_attr` names, and the others too.
    """

    def __init__(
        self,
        key: str,
        typename: type[nn.Module],
        *module_args: Any,
        forward_fn: Callable[[nn.Module, Any], Any] | None = None,
        tied_weight_attr: str | Sequence[str] = ("weight",),
        **module_kwargs: Any,
    ) -> None:
        super().__init__(typename, *module_args, **module_kwargs)
        self.key = key
        self.forward_fn = forward_fn
        names = tied_weight_attr
        self.tied_weight_attr = [names] if isinstance(names, str) else list(names)


@dataclass(frozen=True, eq=False)
class PlacedLayer:
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

    def applies_to(self, row: Sequence[PlacedLayer]) -> bool:
        """Return whether the layers of `row` are run again."""
        if self.types is not None:
            return all(place.name in self.types for place in row)
        return any(
            place.module is not None and next(place.module.parameters(), None) is not None
            for place in row
        )


class Stage(nn.Module):
    """Runs `places` one after the other. A module that stands in several of them is one here."""

    def __init__(self, places: Sequence[PlacedLayer], recomputing: Recomputing) -> None:
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
        step = length if again else len(self._places)
        for first in range(0, len(self._places), step):
            row = self._places[first : first + step]
            if again and self._recomputing.applies_to(row):
                given = x if isinstance(x, tuple) else (x,)
                x = self._recomputing.function(_chained(row), *given)
            else:
                x = _chained(row)(x)
        return x


def _chained(row: Sequence[PlacedLayer]) -> Callable[..., Any]:
    """One layer of `row` after the other; several inputs are a tuple, as between layers."""

    def run(*inputs: Any) -> Any:
        x = inputs[0] if len(inputs) == 1 else inputs
        for place in row:
            x = place.call(x)
        return x

    return run
