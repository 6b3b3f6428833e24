"""Finds the parameters of the models, with their names, places and form in memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import is_

import torch
from torch import Tensor, nn

from shardwise.layout.shards import Shard


@dataclass(eq=False)
class NamedParameter:
    """A parameter of the models: its name, itself, every place that holds it, and its form.

    `shape`, `strides`, `dtype` and `device` are those it had when it was found: what it rests on
    may change. `shard` says which part of a tensor it is, where layers are split over ranks.
    """

    name: str
    parameter: nn.Parameter
    places: list[tuple[nn.Module, str]] = field(default_factory=list)
    shard: Shard | None = None

    def __post_init__(self) -> None:
        self.shape = self.parameter.shape
        self.dtype = self.parameter.dtype
        self.device = self.parameter.device
        self.strides = torch.empty_like(self.parameter, device="meta").stride()

    @property
    def whole_shape(self) -> torch.Size:
        """The shape of the tensor that it is, or is a part of."""
        return self.shape if self.shard is None else torch.Size(self.shard.shape)

    @property
    def alias(self) -> str:
        """What a message calls it."""
        return self.name or "a parameter outside of the models"

    @property
    def can_rest(self) -> bool:
        """Whether its dtype has a NaN, which a sharded parameter is at rest."""
        return self.dtype.is_floating_point or self.dtype.is_complex

    @property
    def in_order(self) -> bool:
        """Whether its elements lie in memory as they are counted, the last dimension fastest."""
        like = torch.empty_strided(self.shape, self.strides, device="meta")
        return like.is_contiguous()

    def view(self, flat: Tensor, start: int) -> Tensor:
        """The elements of `flat` from `start` on, in the form of the parameter."""
        return flat.as_strided(self.shape, self.strides, flat.storage_offset() + start)

    def flat(self, value: Tensor) -> Tensor | None:
        """`value` as one dimension in the order of its memory, without a copy; None where it lies
        in another order than the parameter."""
        if value.stride() != self.strides:
            return None
        return value.detach().as_strided((value.numel(),), (1,))

    def flattened(self, value: Tensor) -> Tensor:
        """`value`, of the parameter's shape, as one dimension in the order of its memory."""
        flat = value.new_empty(value.numel())
        self.view(flat, 0).copy_(value)
        return flat


def locate(models: Iterable[nn.Module], names: Sequence[str]) -> list[NamedParameter]:
    """Every parameter of `models`, in registration order, each once, with all its places.

    Names are those of the plain model: what torch.compile puts in front is left out. With
    several models each name starts with its model's entry of `names`.
    """
    found: dict[nn.Parameter, NamedParameter] = {}
    for model, prefix in zip(models, names, strict=True):
        for path, module in model.named_modules(remove_duplicate=True):
            for key, parameter in module._parameters.items():
                if parameter is None:
                    continue
                name = ".".join(part for part in (prefix, path, key) if part)
                if parameter not in found:
                    found[parameter] = NamedParameter(name.replace("_orig_mod.", ""), parameter)
                found[parameter].places.append((module, key))
    return list(found.values())


class Census:
    """The parameters of `models`, counted anew only when a module or a parameter came or went."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._models = models
        self._count()

    def parameters(self) -> list[nn.Parameter]:
        """Those of each model, in registration order, each once."""
        now = self._children()
        if len(now) != len(self._known) or not all(map(is_, now, self._known)):
            self._count()
        return self._parameters

    def _count(self) -> None:
        self._modules = [module for model in self._models for module in model.modules()]
        self._parameters = [p for model in self._models for p in model.parameters()]
        self._known = self._children()

    def _children(self) -> list[nn.Module | nn.Parameter | None]:
        """What hangs on each module."""
        kinds = ((module._modules, module._parameters) for module in self._modules)
        return [child for pair in kinds for held in pair for child in held.values()]
