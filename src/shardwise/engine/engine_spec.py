"""Defines the inputs of an engine: models, optimizers, settings and process groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn, optim

from shardwise.checkpoint.extra_sets import ExtraSets
from shardwise.comm import Collectives, GatherOrder, Solo, shard_within_hosts
from shardwise.config import Settings
from shardwise.config.outer_optimizer import StalenessRule
from shardwise.engine.context_parallel import ContextParallel
from shardwise.errors import ConfigError, ModelError
from shardwise.islands import hooks as island_hooks
from shardwise.islands.checkpoint import IslandSets
from shardwise.layout.bucket_layout import DATA, EXPERT_COPIES
from shardwise.layout.placement import Placement
from shardwise.layout.shards import Shard
from shardwise.layout.sum_tree import MicroShards
from shardwise.model import units
from shardwise.model.precision import PRESETS, is_cast
from shardwise.model.unit_hooks import UnitHooks
from shardwise.parallel.expert.routing_run import RoutingRun
from shardwise.parallel.expert.split_experts import ExpertParallelModels
from shardwise.parallel.pipeline import PipelineGroup, partition
from shardwise.parallel.tensor.chunked_loss import ChunkedLoss
from shardwise.parallel.tensor.parameter_uses import ParameterUses
from shardwise.parallel.tensor.split_model import TensorParallelModels
from shardwise.states.gradients.gradient_sum import Summation, in_tree
from shardwise.states.optimizer.optimizer_trial import OptimizerKinds
from shardwise.states.parameters.base_weights import find_base_weights
from shardwise.states.parameters.named_parameters import Census, NamedParameter, locate
from shardwise.states.parameters.parameters_at_rest import unguarded
from shardwise.states.shard_groups import ShardGroups
from shardwise.states.step_hooks import StepHooks


@dataclass(frozen=True)
class EngineSpec:
    """The models, optimizers, settings and process groups of an engine.

    They stay the same when the states are rebuilt.
    """

    models: tuple[nn.Module, ...]
    optimizers: tuple[optim.Optimizer, ...]
    placement: Placement
    settings: Settings
    world_group: Collectives
    """All ranks."""
    data_group: Collectives
    """Data-parallel ranks: the ranks in this island that have the same part of the model."""
    device: torch.device
    gather_order: GatherOrder
    """Makes data-parallel ranks gather in the same order inside forward and backward passes."""
    tensor: TensorParallelModels | None = None
    """Tensor parallelism: this rank's part of each layer, or None if layers are not split."""
    pipeline: PipelineGroup | None = None
    """Pipeline parallelism: this rank's layers, or None if every rank has all layers."""
    stage_group: Collectives = field(default_factory=Solo)
    """Ranks of all replicas in this island that have the same pipeline stage."""
    step_group: Collectives = field(default_factory=Solo)
    """Ranks that step together: all ranks or, with islands, the ranks of this island."""
    peers: Collectives = field(default_factory=Solo)
    """Ranks with the same index in each island; only this rank if there is a single island."""
    routing: RoutingRun | None = None
    """Connects the models' mixture-of-experts layers, or None if they have no such layers."""
    experts: ExpertParallelModels | None = None
    """Expert parallelism: this rank's experts, or None if every rank has all of them."""
    unsplit_experts: ExpertParallelModels | None = None
    """Modules whose `forward` exact mode replaces although every rank has all experts."""
    context: ContextParallel | None = None
    """Context parallelism: runs attention over the ranks that have parts of the same sequences."""
    chunked_losses: tuple[ChunkedLoss, ...] = ()
    """The language models that compute their head and loss in chunks."""

    def __post_init__(self) -> None:
        _check_names(self.models, self.settings)
        if self.has_peers:
            island_hooks.check(self.settings, elastic=self.peers.has_changing_ranks)

    @property
    def micro_shards(self) -> MicroShards | None:
        """The micro-shards of a step in exact mode, otherwise None.

        They are divided among the current ranks, whose number may change with `--survive`.
        """
        if self.settings.exact is None:
            return None
        return MicroShards(self.settings.exact, self.world_group.size, self.world_group.rank)

    @property
    def has_peers(self) -> bool:
        """True if there are several islands, or an elastic island that is currently alone."""
        return self.peers.size > 1 or self.peers.has_changing_ranks

    @cached_property
    def hooks(self) -> StepHooks | None:
        """Hooks around each step if there are several islands, otherwise None."""
        return island_hooks.hooks_for(
            self.settings, self.world_group, self.step_group, self.peers, self.shard_group
        )

    @cached_property
    def extra_sets(self) -> ExtraSets:
        """Tensors that checkpoints store in addition to model, optimizers and progress."""
        return IslandSets(self.hooks, self.peers)

    @property
    def staleness(self) -> StalenessRule | None:
        """The islands' staleness rule, or None without `--behind` or with a single island."""
        return self.settings.staleness_rule if self.has_peers else None

    @property
    def has_separate_steps(self) -> bool:
        """True if each island updates its own weights."""
        return self.has_peers and self.staleness is None

    @property
    def gradient_group(self) -> Collectives:
        """The ranks whose gradients are summed."""
        return self.step_group if self.staleness is None else self.world_group

    @property
    def apart(self) -> Collectives:
        """If islands have different weights, the ranks with this rank's index in every island.

        Otherwise just this rank.
        """
        return self.peers if self.staleness is None else Solo()

    @property
    def replicas(self) -> int:
        """Number of model replicas that step together."""
        return self.data_group.size * (1 if self.staleness is None else self.peers.size)

    @property
    def tensor_rank(self) -> int:
        """This rank's index along the tensor-parallel axis."""
        return 0 if self.tensor is None else self.tensor.group.rank

    @property
    def tensor_size(self) -> int:
        """Number of ranks across which each layer is split."""
        return 1 if self.tensor is None else self.tensor.group.size

    @property
    def shares_whole_tensors(self) -> bool:
        """True if layers or experts are split, which first requires full tensors in memory."""
        return self.tensor is not None or self.experts is not None

    @property
    def expert_rank(self) -> int:
        """This rank's index among the ranks that together hold every expert once."""
        return 0 if self.experts is None else self.experts.group.rank

    @cached_property
    def shard_groups(self) -> ShardGroups:
        """The ranks that share buckets: one group for each axis that buckets are sharded along."""
        return ShardGroups(self.shard_group, None if self.experts is None else self.experts.copies)

    @cached_property
    def gather_groups(self) -> ShardGroups:
        """The ranks of `shard_groups` on separate channels, for gathers."""
        if self.experts is None:
            return ShardGroups(self.gather_group)
        return ShardGroups(self.gather_group, self.experts.copies.second_group())

    def axis_of(self, parameter: Tensor) -> str:
        """Return the mesh axis that the bucket of `parameter` is sharded along."""
        return (
            DATA if self.experts is None or parameter not in self.experts.shards else EXPERT_COPIES
        )

    def is_here(self, parameter: Tensor) -> bool:
        """Return whether this rank trains `parameter` or a part of it."""
        return self.pipeline is None or self.pipeline.owns(parameter)

    def stage_of(self, parameter: Tensor) -> int:
        """Return the pipeline stage that trains `parameter`."""
        return 0 if self.pipeline is None else self.pipeline.partition.owners.get(parameter, 0)  # type: ignore[call-overload]

    @property
    def is_whole(self) -> bool:
        """True inside a `full_parameters` block of a model that is otherwise split."""
        splits = (self.tensor, self.pipeline, self.experts)
        return any(split is not None and split.is_whole for split in splits)

    @property
    def takes_writes(self) -> bool:
        """True if writes to a split model in the current `full_parameters` block persist."""
        splits = (self.tensor, self.pipeline, self.experts)
        return any(split is not None and split.writes for split in splits)

    def runs(self, module: nn.Module) -> bool:
        """Return whether this rank runs `module`. A container is judged by its first layer."""
        return (
            self.pipeline is None or self.pipeline.stage_of_module(module) in self.pipeline.stages
        )

    @property
    def pipeline_rank(self) -> int:
        """This rank's index along the pipeline axis."""
        return 0 if self.pipeline is None else self.pipeline.group.rank

    def shard_of(self, parameter: Tensor) -> Shard | None:
        """Return which part of a full tensor `parameter` is, or None if it is not split."""
        # A parameter is split over layers' parts or over experts, never both.
        splits = (split for split in (self.tensor, self.experts) if split is not None)
        shards = (s.shards.get(parameter) for s in splits if isinstance(parameter, nn.Parameter))
        return next((shard for shard in shards if shard is not None), None)

    @property
    def connected_experts(self) -> ExpertParallelModels | None:
        """The mixture-of-experts modules whose `forward` is replaced, if there are any."""
        return self.experts or self.unsplit_experts

    def state_shard_of(self, parameter: nn.Parameter, key: str, value: Tensor) -> Shard | None:
        """Return which part of a full tensor `value`, entry `key` of `parameter`'s state, is."""
        if self.tensor is not None and parameter in self.tensor.shards:
            is_split = self.tensor.is_split(parameter, key, value)
            return self.tensor.shards[parameter] if is_split else None
        return self.shard_of(parameter)

    @property
    def summation(self) -> Summation:
        """The order in which gradients are added across passes and ranks: any order, or a tree."""
        if (shards := self.micro_shards) is None:
            return Summation()
        found = self.connected_experts
        # Workers with other numbers of experts must square the same elements together.
        tensors = [p for _, each in found.fused for p in each.module.parameters()] if found else []
        return in_tree(shards, [p.shape[1:].numel() for p in tensors])

    @cached_property
    def optimizer_kinds(self) -> OptimizerKinds:
        """Cached results of the trial updates that classify optimizers."""
        return OptimizerKinds()

    @cached_property
    def quantised_weights(self) -> set[nn.Parameter]:
        """Frozen parameters stored in 4 bits: those that were frozen when the engine was created.

        Raises ModelError if there is none.
        """
        if not self.settings.quantises_frozen:
            return set()
        if weights := find_base_weights(self.models, self.located()):
            return weights
        raise ModelError(
            "--frozen-weights nf4 has no effect on this model: no nn.Linear in it has a frozen "
            "weight. Freeze the base weights (requires_grad_(False), or PEFT's get_peft_model) "
            'before sw.Engine(...), or pass frozen_weights="full" to this engine.'
        )

    @cached_property
    def prefixes(self) -> tuple[str, ...]:
        """Each model's prefix for parameter names; "" if there is only one model."""
        several = len(self.models) > 1
        return tuple(f"models[{i}]" if several else "" for i in range(len(self.models)))

    @cached_property
    def shard_group(self) -> Collectives:
        """The ranks across which states are sharded: all data-parallel ranks, or this host's."""
        # Replicated states are not sharded, so don't create a group per host for them.
        within = self.settings.shard_within == "host" and self.placement.level > 0
        return shard_within_hosts(self.data_group) if within else self.data_group

    @property
    def cuts_nothing(self) -> bool:
        """True if optimizers can update full tensors.

        This requires that optimizer state is not sharded, no state is on disk, and exact mode is
        off.
        """
        # In exact mode every update must work on intervals: updates of full tensors may round
        # differently, so results would depend on whether the state is sharded.
        alone = self.shard_group.size == 1 or not self.placement.is_sharded("optimizer")
        on_disk = any(tier.kind == "nvme" for tier in self.placement.tiers)
        return alone and not on_disk and self.settings.exact is None

    @property
    def optimizers_stay(self) -> bool:
        """True if the user's own optimizer objects can update the user's own parameters.

        This requires that every rank holds all parameters and optimizer state in full.
        """
        is_split = any(s is not None for s in (self.tensor, self.pipeline, self.experts))
        return self.cuts_nothing and not is_split and not self.placement.is_sharded("parameters")

    @cached_property
    def gather_group(self) -> Collectives:
        """The ranks of `shard_group` on a separate channel, for gathers.

        On different ranks, gathers may be ordered differently relative to other collectives.
        """
        # Creating the side channel is collective, so don't wait for the first forward pass.
        side = self.gather_order.group
        return side if self.shard_group is self.data_group else self.shard_group.second_group()

    def leave_groups(self) -> None:
        """Close the process groups that only this engine uses. Collective."""
        self.world_group.barrier()  # now no rank is still in a collective on one of these groups
        # `cached_property` stores its value in `vars`. Popping it there avoids creating a group
        # only to close it.
        groups = vars(self).pop("gather_groups", None)
        if groups is not None and groups.expert_copies is not None:
            groups.expert_copies.close()
        gathers = vars(self).pop("gather_group", self.data_group)
        sharding = vars(self).pop("shard_group", self.data_group)
        if sharding is not self.data_group:
            for group in dict.fromkeys((gathers, sharding)):
                if group is not self.data_group:
                    group.close()

    @cached_property
    def parameter_uses(self) -> ParameterUses:
        """Detects user code that computes with split parameters."""
        return ParameterUses(self.tensor, self.pipeline)

    @cached_property
    def unit_hooks(self) -> UnitHooks:
        """Module hooks that gather a unit's parameters before its forward pass."""
        return UnitHooks()

    def located(self) -> list[NamedParameter]:
        """Return all of the models' parameters, and parameters that only an optimizer holds."""
        located = locate(self.models, self.prefixes)
        known = {named.parameter for named in located}
        for number, optimizer in enumerate(self.optimizers):
            for group in optimizer.param_groups:
                for index, parameter in enumerate(group["params"]):
                    if parameter not in known:
                        known.add(parameter)
                        name = f"optimizers[{number}].params[{index}]"
                        located.append(NamedParameter(name, parameter))
        cast = PRESETS[self.settings.precision].cast
        for named in located:
            if named.parameter.is_meta:  # not materialised yet: record its future device and dtype
                named.device = self.device
                if cast is not None and is_cast(named.places, cast):
                    named.dtype = cast
            named.shard = self.shard_of(named.parameter)
        return located

    @cached_property
    def _census(self) -> Census:
        return Census(self.models)

    def shape(self) -> Shape:
        """Return the properties of the parameter groups that determine the states' layout."""
        with unguarded():
            # Use the parameters cached in `_census`, because this runs before every backward pass.
            trained = [p.requires_grad for p in self._census.parameters()]
        return Shape([len(g["params"]) for o in self.optimizers for g in o.param_groups], trained)


@dataclass(frozen=True)
class Shape:
    """The parameter groups' lengths, and whether each parameter is trainable."""

    groups: list[int]
    trained: list[bool]

    def fits(self, now: Shape) -> bool:
        """Return whether states that were laid out for this shape can also be used for `now`.

        They can if parameters were only frozen, as when a GAN freezes its discriminator in every
        step. A frozen parameter leaves its slot unused.
        """
        # A different number of parameters or different groups always needs a new layout.
        if (self.groups, len(self.trained)) != (now.groups, len(now.trained)):
            return False
        return all(was or not is_ for was, is_ in zip(self.trained, now.trained, strict=True))


def _check_names(models: Sequence[nn.Module], settings: Settings) -> None:
    """Raise ConfigError if a unit or stage name in the settings matches no module."""
    # Check on any number of workers, even where the names have no effect, so that a typo does not
    # first show up in the large run.
    for pattern in units.unknown(models, settings.units or ()):
        names = [name for model in models for name, _ in model.named_children()]
        raise ConfigError(
            f"units: no module with parameters is called {pattern}. The models have "
            f"{', '.join(names[:8])}; a pattern such as {names[0]}.* matches the modules in one."
            if names
            else f"units: the model has no modules inside that {pattern} could match."
        )
    if settings.stages is not None and len(models) == 1:
        partition.check_names(models[0], settings.units, settings.stages)
