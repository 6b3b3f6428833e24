"""Implements layers that are built later (LayerSpec, TiedLayerSpec), and stages that run them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardwise.errors import UsageError


class LayerSpec:
    """A layer that is built later.

    Args:
        typename: A module class.
        *module_args, **module_kwargs: Its constructor arguments.

    Example:
        ```python
        layers = [LayerSpec(nn.Linear, 8, 8), nn.functional.relu, LayerSpec(nn.Linear, 8, 1)]
        ```
    """

    def __init__(self, typename: type[nn.Module], *module_args: Any, **module_kwargs: Any) -> None:
        if not (isinstance(typename, type) and issubclass(typename, nn.Module)):
            raise UsageError(f"LayerSpec needs a class of torch.nn.Module, not {typename!r}.")
        self.typename = typename
        self.module_args = module_args
        self.module_kwargs = module_kwargs

    def build(self, log: bool = False) -> nn.Module:
        """Build the module."""
        del log
        return self.typename(*self.module_args, **self.module_kwargs)

    def __repr__(self) -> str:
        words = [*map(repr, self.module_args)]
        words += [f"{name}={value!r}" for name, value in self.module_kwargs.items()]
        return f"{self.typename.__name__}({', '.join(words)})"


class TiedLayerSpec(LayerSpec):
    """A layer that shares its module with all layers of the same key.

    Args:
        key: Layers with the same key share one module, with all of its parameters.
        typename: A module class.
        *module_args, **module_kwargs: Its constructor arguments.
        forward_fn: Called as `forward_fn(module, input)` (default: the module's forward).
        tied_weight_attr: Ignored, because all parameters are shared.

    Example:
        ```python
        layers = [
            TiedLayerSpec("embedding", nn.Embedding, 100, 8),
            LayerSpec(nn.Linear, 8, 8),
            TiedLayerSpec(
                "embedding", nn.Embedding, 100, 8, forward_fn=lambda m, x: x @ m.weight.T
            ),
        ]
        ```
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
    """A layer and its index, `number`, in the PipelineModule.

    `call` runs the layer. `module` owns its parameters, and is None for a function.
    """

    number: int
    call: Callable[[Any], Any]
    module: nn.Module | None
    name: str
    """Name of the layer's type."""


@dataclass
class Recomputing:
    """Options of activation checkpointing.

    The backward pass recomputes `interval` consecutive layers at a time. If it is 0, no layers are
    recomputed.
    """

    interval: int
    function: Callable[..., Any]
    types: Sequence[str] | None
    """Types of layers that may be recomputed. None means consecutive layers with parameters."""

    def applies_to(self, row: Sequence[PlacedLayer]) -> bool:
        """Return whether the backward pass recomputes the layers of `row`."""
        if self.types is not None:
            return all(place.name in self.types for place in row)
        return any(
            place.module is not None and next(place.module.parameters(), None) is not None
            for place in row
        )


class Stage(nn.Module):
    """Runs layers in sequence. A module that several layers share is registered once."""

    def __init__(self, places: Sequence[PlacedLayer], recomputing: Recomputing) -> None:
        super().__init__()
        self._places = places
        self._recomputing = recomputing
        for place in places:
            known = any(place.module is module for module in self.children())
            if place.module is not None and not known:
                self.add_module(str(place.number), place.module)

    def forward(self, x: Any) -> Any:
        """Run the layers on `x`, a tensor or a tuple of tensors."""
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
    """Return a function that runs the layers in `row`. Several inputs are passed as a tuple."""

    def run(*inputs: Any) -> Any:
        x = inputs[0] if len(inputs) == 1 else inputs
        for place in row:
            x = place.call(x)
        return x

    return run
