"""Layers that are said now and built later: LayerSpec, and TiedLayerSpec for a module in several
places."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

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
        """A new module."""
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
