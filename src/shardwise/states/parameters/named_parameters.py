"""Finds the models' parameters and records their names, layouts and owning modules."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import is_

import torch
from torch import Tensor, nn

from shardwise.layout.shards import Shard


@dataclass(eq=False)
class NamedParameter:
    """A parameter of the models, with its name, its layout and the modules that register it.

    `places` lists each module and attribute name that registers the parameter. `shape`, `strides`,
    `dtype` and `device` are recorded at construction, because the parameter's data may be swapped
    later. If the parameter belongs to a layer that is split across ranks, `shard` describes this
    rank's part of the full tensor.
    """

    name: str
    parameter: nn.Parameter
    places: list[tuple[nn.Module, str]] = field(default_factory=list)
    shard: Shard | None = None

    def __post_init__(self) -> None:
        self.shape = self.parameter.shape
        self.dtype = self.parameter.dtype
        self.device = self.parameter.device
        # Strides of a dense copy. The parameter itself may be a view with gaps, but its order of
        # dims (channels_last) is preserved in a bucket.
        self.strides = torch.empty_like(self.parameter, device="meta").stride()

    @property
    def whole_shape(self) -> torch.Size:
        """Shape of the full tensor, of which this rank may hold only a part."""
        return self.shape if self.shard is None else torch.Size(self.shard.shape)

    def part_shape(self, whole: Sequence[int]) -> Sequence[int]:
        """Return the shape of this rank's part of optimizer state whose full shape is `whole`.

        State that has a different shape than the parameter is not split.
        """
        return self.shape if tuple(whole) == tuple(self.whole_shape) else whole

    @property
    def alias(self) -> str:
        """The parameter's name in messages."""
        return self.name or "a parameter outside of the models"

    @property
    def can_rest(self) -> bool:
        """True if the parameter can be sharded: its dtype has a NaN, used as a placeholder."""
        return self.dtype.is_floating_point or self.dtype.is_complex

    @property
    def in_order(self) -> bool:
        """True if the parameter's memory is contiguous in row-major order."""
        like = torch.empty_strided(self.shape, self.strides, device="meta")
        return like.is_contiguous()

    def view(self, flat: Tensor, start: int) -> Tensor:
        """Return a view of `flat` in the parameter's layout, starting at element `start`."""
        return flat.as_strided(self.shape, self.strides, flat.storage_offset() + start)

    def flat(self, value: Tensor) -> Tensor | None:
        """Return `value` as a 1-D tensor in memory order, without a copy.

        Returns None if the strides of `value` differ from the parameter's.
        """
        if value.stride() != self.strides:
            return None
        return value.detach().as_strided((value.numel(),), (1,))

    def flattened(self, value: Tensor) -> Tensor:
        """Return a 1-D copy of `value`, with the elements in the parameter's memory order."""
        flat = value.new_empty(value.numel())
        self.view(flat, 0).copy_(value)
        return flat


def locate(models: Iterable[nn.Module], names: Sequence[str]) -> list[NamedParameter]:
    """Return every parameter of `models` once, in registration order, with all of its places.

    Each parameter's name starts with its model's entry in `names`, which is empty for a single
    model. The prefix that torch.compile adds is removed.
    """
    found: dict[nn.Parameter, NamedParameter] = {}
    for model, prefix in zip(models, names, strict=True):
        for path, module in model.named_modules(remove_duplicate=True):
            for key, parameter in module._parameters.items():
                if parameter is None:
                    continue
                # A tied parameter has several places, and is named after the first one.
                name = ".".join(part for part in (prefix, path, key) if part)
                if parameter not in found:
                    found[parameter] = NamedParameter(name.replace("_orig_mod.", ""), parameter)
                found[parameter].places.append((module, key))
    return list(found.values())


class Census:
    """The parameters of `models`, collected again only if a module or parameter has changed."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._models = models
        self._count()

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters of all models, in registration order."""
        # Compare by identity: `==` would run a tensor operation.
        now = self._children()
        if len(now) != len(self._known) or not all(map(is_, now, self._known)):
            self._count()
        return self._parameters

    def _count(self) -> None:
        self._modules = [module for model in self._models for module in model.modules()]
        self._parameters = [p for model in self._models for p in model.parameters()]
        self._known = self._children()

    def _children(self) -> list[nn.Module | nn.Parameter | None]:
        """Return the submodules and parameters that each module registers."""
        kinds = ((module._modules, module._parameters) for module in self._modules)
        return [child for pair in kinds for held in pair for child in held.values()]
