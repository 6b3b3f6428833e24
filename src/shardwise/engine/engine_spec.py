"""EngineSpec is what an engine is made from: models, optimizers, settings, groups of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn, optim

from shardwise.comm import Collectives, GatherOrder, Solo, shard_within_hosts
from shardwise.config import Settings
from shardwise.config.outer_optimizer import StalenessRule
from shardwise.errors import ConfigError
from shardwise.islands import island_refusals
from shardwise.layout.placement import Placement
from shardwise.layout.shards import Shard
from shardwise.layout.sum_tree import MicroShards
from shardwise.model import units
from shardwise.model.precision import PRESETS, is_cast
from shardwise.model.unit_hooks import UnitHooks
from shardwise.parallel.pipeline import PipelineGroup, partition
from shardwise.parallel.tensor.parameter_uses import ParameterUses
from shardwise.parallel.tensor.split_model import TensorParallelModels
from shardwise.states.gradients.gradient_accumulator import Summation, in_tree
from shardwise.states.optimizer.optimizer_trial import OptimizerKinds
from shardwise.states.parameters.named_parameters import Census, NamedParameter, locate
from shardwise.states.parameters.parameters_at_rest import unguarded


@dataclass(frozen=True)
class EngineSpec:
    """Models, optimizers, settings and groups of ranks; they stay over every rebuild of states."""

    models: tuple[nn.Module, ...]
    optimizers: tuple[optim.Optimizer, ...]
    placement: Placement
    settings: Settings
    world_group: Collectives
    """All ranks."""
    data_group: Collectives
    """The data-parallel ranks: those with the same part of the model, or all, in this island."""
    device: torch.device
    gather_order: GatherOrder
    """The order in which the data-parallel ranks gather, inside forwards and backwards."""
    micro_shards: MicroShards | None = None
    """How a step is cut in the exact mode."""
    tensor: TensorParallelModels | None = None
    """Tensor parallelism: the part of each layer that this rank has. None without."""
    pipeline: PipelineGroup | None = None
    """Pipeline parallelism: the layers that this rank has. None without."""
    stage_group: Collectives = field(default_factory=Solo)
    """The ranks of all replicas with the same stage of the pipeline, in this island."""
    step_group: Collectives = field(default_factory=Solo)
    """The ranks that make steps together: all, or those of this island."""
    peers: Collectives = field(default_factory=Solo)
    """The ranks of equal place in all islands; this rank alone where there is one."""

    def __post_init__(self) -> None:
        _check_names(self.models, self.settings)
        if self.has_islands:
            island_refusals.check(self.settings, elastic=self.peers.comes_and_goes)

    @property
    def has_islands(self) -> bool:
        """Whether there are several islands, or may be."""
        return self.peers.size > 1 or self.peers.comes_and_goes

    @property
    def staleness(self) -> StalenessRule | None:
        """How several islands make gradients equal; None where they make parameters so, by steps
        of their own, and where there is one."""
        return self.settings.staleness_rule if self.has_islands else None

    @property
    def steps_apart(self) -> bool:
        """Whether islands make steps of their own, also where this one is alone for now."""
        return self.has_islands and self.staleness is None

    @property
    def apart(self) -> Collectives:
        """The ranks of equal place in those islands that have weights of their own; this rank alone
        where all have the same."""
        return self.peers if self.staleness is None else Solo()

    @property
    def replicas(self) -> int:
        """How many replicas of the model make a step together."""
        return self.data_group.size * (1 if self.staleness is None else self.peers.size)

    @property
    def tensor_rank(self) -> int:
        """This rank's place along the tensor-parallel axis."""
        return 0 if self.tensor is None else self.tensor.group.rank

    def is_here(self, parameter: Tensor) -> bool:
        """Whether this rank trains `parameter`, or a part of it."""
        return self.pipeline is None or self.pipeline.owns(parameter)

    def stage_of(self, parameter: Tensor) -> int:
        """The stage that trains `parameter`."""
        return 0 if self.pipeline is None else self.pipeline.partition.owners.get(parameter, 0)  # type: ignore[call-overload]

    @property
    def is_whole(self) -> bool:
        """Whether this rank has the whole model now, inside `full_parameters` with `--tensor` or
        `--pipeline`."""
        split, line = self.tensor, self.pipeline
        return (split is not None and split.is_whole) or (line is not None and line.is_whole)

    @property
    def takes_writes(self) -> bool:
        """Whether values that are written inside that block are kept."""
        split, line = self.tensor, self.pipeline
        return (split is not None and split.writes) or (line is not None and line.writes)

    def runs(self, module: nn.Module) -> bool:
        """Whether this rank runs `module`, or the first of what is in it."""
        return (
            self.pipeline is None or self.pipeline.stage_of_module(module) in self.pipeline.stages
        )

    @property
    def pipeline_rank(self) -> int:
        """This rank's place along the pipeline axis."""
        return 0 if self.pipeline is None else self.pipeline.group.rank

    def shard_of(self, parameter: Tensor) -> Shard | None:
        """The part of a whole tensor that `parameter` is; None where it is whole."""
        if self.tensor is None or not isinstance(parameter, nn.Parameter):
            return None
        return self.tensor.shards.get(parameter)

    @cached_property
    def summation(self) -> Summation:
        """How gradients of several backwards and ranks are added: in any order, or in one tree."""
        return Summation() if self.micro_shards is None else in_tree(self.micro_shards)

    @cached_property
    def optimizer_kinds(self) -> OptimizerKinds:
        """What trials have found of the optimizers."""
        return OptimizerKinds()

    @cached_property
    def prefixes(self) -> tuple[str, ...]:
        """The prefix of the names of each model: empty when there is one."""
        several = len(self.models) > 1
        return tuple(f"models[{i}]" if several else "" for i in range(len(self.models)))

    @cached_property
    def shard_group(self) -> Collectives:
        """The ranks over which states are sharded: all, or those of a host."""
        within = self.settings.shard_within == "host" and self.placement.level > 0
        return shard_within_hosts(self.data_group) if within else self.data_group

    @property
    def cuts_nothing(self) -> bool:
        """Whether an optimizer can have all tensors whole: its state is neither sharded nor on a
        disk, and the exact mode, whose bits would depend on it, is off."""
        alone = self.shard_group.size == 1 or not self.placement.is_sharded("optimizer")
        on_disk = any(tier.kind == "nvme" for tier in self.placement.tiers)
        return alone and not on_disk and self.micro_shards is None

    @property
    def optimizers_stay(self) -> bool:
        """Whether each rank has all parameters and all optimizer state whole, so that the user's
        own optimizer can update its own parameters."""
        in_parts = self.tensor is not None or self.pipeline is not None
        return self.cuts_nothing and not in_parts and not self.placement.is_sharded("parameters")

    @cached_property
    def gather_group(self) -> Collectives:
        """The same ranks for gathers, whose order against other collectives may differ."""
        side = (
            self.gather_order.group
        )  # made here, by all ranks: not in the first forward that asks
        return side if self.shard_group is self.data_group else self.shard_group.second_group()

    def leave_groups(self) -> None:
        """Close the groups of ranks that were made for this engine alone. Collective."""
        self.world_group.barrier()  # nobody is in one of them any more
        gathers = vars(self).pop("gather_group", self.data_group)
        sharding = vars(self).pop("shard_group", self.data_group)
        if sharding is not self.data_group:
            for group in dict.fromkeys((gathers, sharding)):
                if group is not self.data_group:
                    group.close()

    @cached_property
    def parameter_uses(self) -> ParameterUses:
        """Follows user code that computes with parameters of which this rank has a part."""
        return ParameterUses(self.tensor, self.pipeline)

    @cached_property
    def unit_hooks(self) -> UnitHooks:
        """The hooks by which forwards gather the units that they need."""
        return UnitHooks()

    def located(self) -> list[NamedParameter]:
        """Every parameter of the models, and those that only an optimizer knows."""
        found = locate(self.models, self.prefixes)
        known = {named.parameter for named in found}
        for number, optimizer in enumerate(self.optimizers):
            for group in optimizer.param_groups:
                for index, parameter in enumerate(group["params"]):
                    if parameter not in known:
                        known.add(parameter)
                        name = f"optimizers[{number}].params[{index}]"
                        found.append(NamedParameter(name, parameter))
        for named in found:
            self._foresee(named)
            named.shard = self.shard_of(named.parameter)
        return found

    def _foresee(self, named: NamedParameter) -> None:
        """Set device and dtype that a parameter without memory will have."""
        if not named.parameter.is_meta:
            return
        named.device = self.device
        cast = PRESETS[self.settings.precision].cast
        if cast is not None and is_cast(named.places, cast):
            named.dtype = cast

    @cached_property
    def _census(self) -> Census:
        return Census(self.models)

    def shape(self) -> Shape:
        """The parameter groups and what is trained: the states are laid out for these."""
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
