"""What an engine is made from: the user's models and optimizers, and the ranks that share them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn, optim

from shardwise.collectives import Collectives, GatherOrder, Solo, within_hosts
from shardwise.config import Settings
from shardwise.errors import ConfigError
from shardwise.model import units
from shardwise.model.precision import PRESETS, is_cast
from shardwise.model.unit_hooks import Doors
from shardwise.parallel.pipeline import Line, partition
from shardwise.parallel.tensor.parameter_uses import Uses
from shardwise.parallel.tensor.split_model import Split
from shardwise.placement import Placement
from shardwise.shards import Shard
from shardwise.states.accumulator import Summation, in_tree
from shardwise.states.resting import unguarded
from shardwise.states.tracked import Census, Tracked, locate
from shardwise.sum_tree import MicroShards


@dataclass(frozen=True)
class Recipe:
    """What the states are made from; the same after a rebuild."""

    models: tuple[nn.Module, ...]
    optimizers: tuple[optim.Optimizer, ...]
    placement: Placement
    settings: Settings
    run: Collectives
    """All ranks."""
    group: Collectives
    """The data-parallel ones: those with the same part of the model, or all."""
    device: torch.device
    order: GatherOrder
    """What those of the data-parallel ranks take turns in, inside forwards and backwards."""
    shards: MicroShards | None = None
    """How a step is cut in the exact mode."""
    split: Split | None = None
    """What each rank of a replica has of the models, where layers are split."""
    line: Line | None = None
    """Which layers each rank of a replica has, where they are shared out."""
    stage: Collectives = field(default_factory=Solo)
    """The ranks of all replicas that have these layers, or parts of them."""

    def __post_init__(self) -> None:
        _check_names(self.models, self.settings)

    @property
    def part(self) -> int:
        """Which part of split layers this rank has."""
        return 0 if self.split is None else self.split.group.rank

    def is_here(self, parameter: Tensor) -> bool:
        """Whether this rank trains `parameter`, or a part of it."""
        return self.line is None or self.line.has(parameter)

    def stage_of(self, parameter: Tensor) -> int:
        """The stage that trains `parameter`."""
        return 0 if self.line is None else self.line.cut.owners.get(parameter, 0)  # type: ignore[call-overload]

    @property
    def is_whole(self) -> bool:
        """Whether this rank has the whole of a split model for now."""
        split, line = self.split, self.line
        return (split is not None and split.is_whole) or (line is not None and line.is_whole)

    @property
    def is_written(self) -> bool:
        """Whether what is written into it then is taken in."""
        split, line = self.split, self.line
        return (split is not None and split.writes) or (line is not None and line.writes)

    def runs(self, module: nn.Module) -> bool:
        """Whether this rank runs `module`, or the first of what is in it."""
        return self.line is None or self.line.stage_of_module(module) in self.line.stages

    @property
    def layers(self) -> int:
        """Which of the workers that share out the layers this one is."""
        return 0 if self.line is None else self.line.group.rank

    def shard_of(self, parameter: Tensor) -> Shard | None:
        """Which part of a whole tensor `parameter` is, where it is one."""
        if self.split is None or not isinstance(parameter, nn.Parameter):
            return None
        return self.split.shards.get(parameter)

    @cached_property
    def summation(self) -> Summation:
        """How gradients become one sum."""
        return Summation() if self.shards is None else in_tree(self.shards)

    @cached_property
    def prefixes(self) -> tuple[str, ...]:
        """What stands before the names of each model: nothing when there is one."""
        several = len(self.models) > 1
        return tuple(f"models[{i}]" if several else "" for i in range(len(self.models)))

    @cached_property
    def sharding(self) -> Collectives:
        """The ranks over which states are sharded: all, or those of a host."""
        within = self.settings.shard_within == "host" and self.placement.level > 0
        return within_hosts(self.group) if within else self.group

    @property
    def cuts_nothing(self) -> bool:
        """Whether an optimizer can have all tensors as they are: its state is neither shared out
        nor on a disk, nor may the exact mode's bits depend on that."""
        alone = self.sharding.size == 1 or not self.placement.is_sharded("optimizer")
        on_disk = any(tier.kind == "nvme" for tier in self.placement.tiers)
        return alone and not on_disk and self.shards is None

    @cached_property
    def gather_group(self) -> Collectives:
        """The same ranks for gathers, whose order against other collectives may differ."""
        side = self.order.group  # made here, by all ranks: not in the first forward that asks
        return side if self.sharding is self.group else self.sharding.second_group()

    def leave_groups(self) -> None:
        """Close the groups of ranks that were made for this engine alone. Collective."""
        self.run.barrier()  # nobody is in one of them any more
        gathers = vars(self).pop("gather_group", self.group)
        sharding = vars(self).pop("sharding", self.group)
        if sharding is not self.group:
            for group in dict.fromkeys((gathers, sharding)):
                if group is not self.group:
                    group.close()

    @cached_property
    def uses(self) -> Uses:
        """What follows the user's lines where they compute with parameters that are in parts."""
        return Uses(self.split, self.line)

    @cached_property
    def doors(self) -> Doors:
        """Where forwards tell which sharded parameters they need."""
        return Doors()

    def located(self) -> list[Tracked]:
        """Every parameter of the models, and those that only an optimizer knows."""
        found = locate(self.models, self.prefixes)
        known = {tracked.parameter for tracked in found}
        for number, optimizer in enumerate(self.optimizers):
            for group in optimizer.param_groups:
                for index, parameter in enumerate(group["params"]):
                    if parameter not in known:
                        known.add(parameter)
                        found.append(Tracked(f"optimizers[{number}].params[{index}]", parameter))
        for tracked in found:
            self._foresee(tracked)
            tracked.shard = self.shard_of(tracked.parameter)
        return found

    def _foresee(self, tracked: Tracked) -> None:
        """Say where a parameter without memory will be, and as what."""
        if not tracked.parameter.is_meta:
            return
        tracked.device = self.device
        cast = PRESETS[self.settings.precision].cast
        if cast is not None and is_cast(tracked.places, cast):
            tracked.dtype = cast

    @cached_property
    def _census(self) -> Census:
        return Census(self.models)

    def shape(self) -> Shape:
        """What the states are laid out for."""
        with unguarded():
            trained = [p.requires_grad for p in self._census.parameters()]
        return Shape([len(g["params"]) for o in self.optimizers for g in o.param_groups], trained)


@dataclass(frozen=True)
class Shape:
    """The lengths of the parameter groups, and by parameter whether it is trained."""

    groups: list[int]
    trained: list[bool]

    def fits(self, now: Shape) -> bool:
        """Whether states laid out for this serve `now` too.

        A parameter that is frozen on the way stays where it is, without a gradient: a GAN freezes
        its discriminator in every step.
        """
        if (self.groups, len(self.trained)) != (now.groups, len(now.trained)):
            return False
        return all(was or not is_ for was, is_ in zip(self.trained, now.trained, strict=True))


def _check_names(models: Sequence[nn.Module], settings: Settings) -> None:
    """Raise ConfigError for names of units or stages that name nothing, however many workers there
    are."""
    for pattern in units.unknown(models, settings.units or ()):
        names = [name for model in models for name, _ in model.named_children()]
        raise ConfigError(
            f"units: no module with parameters is called {pattern}. The models' parts are "
            f"{', '.join(names[:8])}; a pattern such as {names[0]}.* names what is in one."
            if names
            else f"units: the model has no parts to be called {pattern}."
        )
    if settings.stages is not None and len(models) == 1:
        partition.check_names(models[0], settings.units, settings.stages)
