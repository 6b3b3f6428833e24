"""Builds the three states from the user's models and optimizers, and takes them apart again."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.config import flag
from shardwise.engine import initial_values, island_states, unit_assignment, usage_checks
from shardwise.engine.engine_spec import EngineSpec
from shardwise.engine.unit_assignment import Sections
from shardwise.errors import ModelError
from shardwise.islands.anchor import Kept
from shardwise.islands.delayed_sums import DelayedSums
from shardwise.islands.island_exchange import IslandExchange
from shardwise.layout import bucket_layout
from shardwise.layout.placement import STATES
from shardwise.model import sync_batch_norm
from shardwise.model.module_hooks import Hooked
from shardwise.model.optimizer_access import held
from shardwise.states.gradients.gradients import Gradients
from shardwise.states.optimizer.ema import Averages
from shardwise.states.optimizer.interval_gather import IntervalGather
from shardwise.states.optimizer.optimizer_kind import OptimizerKind, is_known
from shardwise.states.optimizer.optimizer_lr_and_options import ParameterGroup
from shardwise.states.optimizer.optimizer_state import OptimizerState
from shardwise.states.parameters.named_parameters import NamedParameter
from shardwise.states.parameters.parameters import Parameters, ReplicatedParameters
from shardwise.states.parameters.residency import Residency
from shardwise.states.parameters.sharded_parameters import ShardedParameters
from shardwise.states.storage.storage_factory import StorageFactory


@dataclass(frozen=True)
class ShardedUnits:
    """The units of sharded parameters, and what gathers them while they are needed."""

    sections: Sections
    residency: Residency
    handles: list[Hooked]


@dataclass(frozen=True)
class BucketBytes:
    """Parameters that lie in one bucket, and the bytes of each state of them on one rank, in the
    order of STATES."""

    named: Sequence[NamedParameter]
    sizes: tuple[int, int, int]


@dataclass(frozen=True)
class States:
    """Parameters, gradients and optimizer state, laid out and connected.

    `shown` gathers parameters where they are sharded; `averages` where `ema_decay` is given,
    `islands` where those have weights of their own, `delayed` where several have the same.
    """

    parameters: Parameters
    gradients: Gradients
    optimizer: OptimizerState
    gathering: IntervalGather
    shown: ShardedUnits | None
    storage_factories: dict[str, StorageFactory]
    averages: Averages | None
    islands: IslandExchange | None
    delayed: DelayedSums | None

    @property
    def state_bytes(self) -> int:
        """Bytes of parameters, gradients, optimizer state, averages and anchor on this rank now."""
        gradients = self.gradients.reducer.state_bytes
        states = self.parameters.state_bytes + gradients + self.optimizer.state_bytes
        return states + sum(self.bytes_beside().values())

    def bytes_beside(self) -> dict[str, int]:
        """Bytes of what is kept beside the three states, by its name, where there is some."""
        kept = {
            "averages": self.averages,
            "what islands have in common": self.islands,
            "gradients between islands": self.delayed,
        }
        return {name: x.state_bytes for name, x in kept.items() if x and x.state_bytes}

    def buckets_by(self, key: Callable[[nn.Parameter], int]) -> dict[int, frozenset[int]]:
        """The numbers of the buckets by `key` of the parameters in them."""
        found: dict[int, set[int]] = defaultdict(set)
        for number, bucket in enumerate(self.parameters.buckets):
            for slot in bucket.slots:
                found[key(self.parameters.named[slot.parameter].parameter)].add(number)
        return {value: frozenset(numbers) for value, numbers in found.items()}

    def expected_bytes(self) -> int:
        """The same once the optimizers have made all of their state."""
        return sum(self.bytes_beside().values()) + sum(self.bytes_by_state().values())

    def bytes_by_state(self) -> dict[str, int]:
        """Bytes on this rank by name of STATES, wherever they rest, averages and anchor left out;
        once the optimizers have made all of their state."""
        sizes = zip(*(bucket.sizes for bucket in self.bytes_by_bucket()), strict=True)
        return dict(zip(STATES, map(sum, sizes), strict=True))

    def bytes_by_bucket(self) -> list[BucketBytes]:
        """The same by bucket, those of frozen parameters that are laid out last."""
        parameters, buckets = self.parameters, self.gradients.reducer.buckets
        found = [
            BucketBytes(
                [parameters.named[slot.parameter] for slot in bucket.slots],
                (
                    parameters.held_bytes(index),
                    buckets[index].nbytes,
                    self.optimizer.expected_bytes(index),
                ),
            )
            for index, bucket in enumerate(parameters.buckets)
        ]
        frozen = parameters.frozen_bytes()
        return found + [BucketBytes(named, (nbytes, 0, 0)) for named, nbytes in frozen]


def build(
    spec: EngineSpec,
    masters: Mapping[nn.Parameter, Tensor],
    averages: Mapping[nn.Parameter, Tensor] | None = None,
    anchor: Kept | None = None,
) -> States:
    """Lay the three states over the models and optimizers of `spec`. Collective.

    `masters` are values in the master dtype for 16-bit parameters, where they are known better
    than the parameters themselves say; `averages` and `anchor` those to go on with.
    """
    owners = _owners(spec)
    everything = spec.located()
    _check_trainable(everything, owners, main=spec.world_group.rank == 0)
    located = [t for t in everything if spec.is_here(t.parameter)]
    # What has an average stays laid out while it is frozen, since its average goes on; so does what
    # has an anchor, since islands may have other values of it until they are equal next.
    kept = {*(averages or {}), *island_states.anchored(anchor)}
    named = [
        t
        for t in located
        if t.parameter in owners and (t.parameter.requires_grad or t.parameter in kept)
    ]
    storage_factories = {
        state: StorageFactory(spec.placement.tier(state), spec.shard_group) for state in STATES
    }
    parameters, shown = _parameters(spec, located, named, owners, storage_factories["parameters"])
    gradients = _gradients(spec, parameters, shown, storage_factories["gradients"])
    scattered = spec.placement.is_sharded("optimizer")
    groups = [owners[named[bucket.slots[0].parameter].parameter] for bucket in parameters.buckets]
    optimizer = OptimizerState(
        parameters,
        groups,
        [bucket.own for bucket in gradients.reducer.buckets],
        storage_factories["optimizer"],
        by_spans=any(factory.on_disk for factory in storage_factories.values()),
        sends=scattered and shown is None and spec.shard_group.size > 1,
        known=masters,
    )
    return States(
        parameters,
        gradients,
        optimizer,
        IntervalGather(parameters, optimizer, spec.shard_group, scattered=scattered),
        shown,
        storage_factories,
        _averages(spec, parameters, optimizer, storage_factories["optimizer"], averages),
        island_states.build(spec, parameters, optimizer, storage_factories["optimizer"], anchor),
        island_states.delay(spec, parameters, gradients, storage_factories["optimizer"]),
    )


def _gradients(
    spec: EngineSpec, parameters: Parameters, shown: ShardedUnits | None, factory: StorageFactory
) -> Gradients:
    """The gradients of `parameters`, whose buckets start where all ranks can follow."""
    gradients = Gradients(
        parameters,
        spec.placement,
        spec.shard_group,
        factory,
        spec.summation,
        overlap=spec.settings.overlap,
        exact_sum=spec.settings.reduce_dtype == "fp32",
        stray=usage_checks.stray_backward,
        elsewhere=_counted_elsewhere(spec, parameters),
    )
    if shown is not None:
        gradients.paced = _pace(parameters, gradients, shown)
    # Synchronised BatchNorm waits for other ranks inside backward. Where units take turns, its
    # statistics take theirs too. Elsewhere this rank must not wait for the sum of a bucket as
    # well: a rank that has not used the same parameters would wait in BatchNorm for this one.
    synchronised = bool(sync_batch_norm.converted(spec.models))
    gradients.reducer.patient = gradients.paced or not synchronised
    return gradients


def _averages(
    spec: EngineSpec,
    parameters: Parameters,
    optimizer: OptimizerState,
    factory: StorageFactory,
    start: Mapping[nn.Parameter, Tensor] | None,
) -> Averages | None:
    """The moving averages of `parameters`, from `start` on; None where none are kept."""
    decay = spec.settings.ema_decay
    if decay is None:
        return None
    scattered = spec.placement.is_sharded("optimizer")
    return Averages(parameters, optimizer, decay, factory, scattered=scattered, start=start)


def _counted_elsewhere(spec: EngineSpec, parameters: Parameters) -> set[int]:
    """The buckets whose norm another rank of the replica counts, since all have them alike."""
    if spec.tensor_rank == 0:
        return set()
    return {
        number
        for number, bucket in enumerate(parameters.buckets)
        if parameters.named[bucket.slots[0].parameter].shard is None
    }


def _pace(parameters: Parameters, gradients: Gradients, shown: ShardedUnits) -> bool:
    """Start the buckets of a unit when all ranks have passed it in backward; returns whether
    units are gathered in turns."""
    buckets: dict[int, list[int]] = defaultdict(list)
    for number, bucket in enumerate(parameters.buckets):
        first = parameters.named[bucket.slots[0].parameter].parameter
        buckets[shown.sections.unit_of[first]].append(number)
    return shown.residency.pace(lambda unit: gradients.start(buckets[unit]))


def take_apart(
    spec: EngineSpec, states: States
) -> tuple[dict[Any, Tensor], dict[Any, Tensor] | None, Kept | None]:
    """Give everything back to the user's objects; returns masters, averages and what is kept of the
    anchor, by parameter."""
    masters = states.gathering.masters()
    averages = states.gathering.tensors(states.averages.loaded()) if states.averages else None
    island_states.drop(states.delayed)
    anchor = island_states.take_apart(states.islands, states.parameters, states.gathering)
    for parameter, state in states.gathering.optimizer_state().items():
        for optimizer in spec.optimizers:
            if any(parameter is p for group in optimizer.param_groups for p in group["params"]):
                held(optimizer)[parameter] = state
    states.optimizer.return_common_state()
    states.gradients.detach()
    if states.shown is not None:
        states.shown.residency.close()
        for handle in states.shown.handles:
            handle.remove()
    states.parameters.release()
    for factory in states.storage_factories.values():
        factory.close()
    return masters, averages, anchor


def _owners(spec: EngineSpec) -> dict[nn.Parameter, ParameterGroup]:
    """Which group trains each parameter. Raises ModelError for one in two groups, and for an
    optimizer that cannot work where its state is sharded."""
    owners: dict[nn.Parameter, ParameterGroup] = {}
    kinds = spec.optimizer_kinds
    for optimizer in spec.optimizers:
        for index, options in enumerate(optimizer.param_groups):
            if not options["params"]:
                continue
            stays = spec.optimizers_stay and not is_known(optimizer)
            device = _device_of(spec, options["params"][0])
            # A sharded state is refused for what stays: the trial of a copy says why.
            is_copied = not stays or spec.placement.is_sharded("optimizer")
            kind = kinds.of(optimizer, options, device, is_copied=is_copied)
            parts = [p for p in options["params"] if spec.shard_of(p) is not None]
            _check_kind(spec, type(optimizer).__name__, kind, len(parts), index)
            as_given = not kind.known and not parts and spec.cuts_nothing
            for parameter in options["params"]:
                if parameter in owners:
                    first, second = type(owners[parameter].optimizer), type(optimizer)
                    raise ModelError(
                        f"A parameter of shape {tuple(parameter.shape)} is in two parameter groups "
                        f"({first.__name__} and {second.__name__}): give each parameter to one "
                        "optimizer."
                    )
                owners[parameter] = ParameterGroup(
                    optimizer,
                    index,
                    kind,
                    whole=as_given or not kind.elementwise,
                    together=as_given or not kind.separable,
                    stays=stays,
                )
    return owners


def _check_kind(spec: EngineSpec, name: str, kind: OptimizerKind, split: int, group: int) -> None:
    """Raise ModelError for an optimizer of a `kind` that cannot work on the parts of tensors that
    a rank has; tensor parallelism has `split` so many tensors of its `group`."""
    if not kind.separable and spec.placement.is_sharded("optimizer"):
        raise ModelError(
            f"{name} looks across tensors, so its state cannot be sharded "
            f"({spec.placement.name}). Train it with --zero 0, or choose an optimizer that treats "
            "each tensor by itself."
        )
    if not kind.separable and spec.pipeline is not None:
        raise ModelError(
            f"{name} looks across tensors, and with --pipeline no worker has all of them. Choose "
            "an optimizer that treats each tensor by itself, or start without --pipeline."
        )
    if not kind.elementwise and split:
        raise ModelError(
            f"{name} needs whole tensors, and --tensor {spec.settings.tensor} splits {split} of "
            f"group {group}. Choose an element-wise optimizer such as AdamW, or start without "
            "--tensor."
        )
    tiers = {n: getattr(spec.settings, n) for n in _OFFLOADS}
    on_disk = [name for name, tier in tiers.items() if tier is not None and tier.kind == "nvme"]
    if not on_disk:
        return
    # One state on a disk cuts the update into spans, wherever the optimizer's own state is.
    given = " and ".join(f"{flag(name)} {tiers[name]}" for name in on_disk)
    instead = f"Write {' '.join(f'{flag(name)} cpu' for name in on_disk)}"
    if not kind.elementwise:
        raise ModelError(
            f"{name} needs whole tensors, and with {given} each update is of a part. {instead}, "
            "or choose an element-wise optimizer such as AdamW."
        )
    if kind.attributes:
        raise ModelError(
            f"{name} changes its attribute {min(kind.attributes)} in every call of step, and with "
            f"{given} there are several calls in a step. {instead}, or let it keep the value by "
            "parameter, in self.state."
        )


_OFFLOADS = ("offload_params", "offload_gradients", "offload_optimizer")


def _device_of(spec: EngineSpec, parameter: nn.Parameter) -> torch.device:
    return spec.device if parameter.is_meta else parameter.device


def _check_trainable(
    located: Sequence[NamedParameter], owners: Mapping[nn.Parameter, ParameterGroup], *, main: bool
) -> None:
    if not any(t.parameter.requires_grad for t in located):
        raise ModelError(
            "The model has no trainable parameter (all have requires_grad=False, or there are "
            "none): there is nothing for the engine to train."
        )
    lost = [t.name for t in located if t.parameter.requires_grad and t.parameter not in owners]
    if len(lost) == sum(t.parameter.requires_grad for t in located):
        raise ModelError(
            "No optimizer holds a trainable parameter of the model: pass model.parameters() to it."
        )
    if lost and main:
        warnings.warn(
            f"{len(lost)} trainable parameter(s) are in no optimizer and will not be trained: "
            f"{', '.join(lost[:5])}{' ...' if len(lost) > 5 else ''}.",
            stacklevel=4,
        )


def _parameters(
    spec: EngineSpec,
    located: Sequence[NamedParameter],
    named: Sequence[NamedParameter],
    owners: Mapping[nn.Parameter, ParameterGroup],
    factory: StorageFactory,
) -> tuple[Parameters, ShardedUnits | None]:
    """The parameters as the placement wants them, and what shows them where they are sharded."""
    if not spec.placement.is_sharded("parameters"):
        buckets = _buckets(spec, [_spec(spec, t, owners[t.parameter], 0) for t in named])
        published = spec.placement.is_sharded("optimizer")
        return ReplicatedParameters(named, buckets, spec.shard_group, published=published), None
    found = unit_assignment.divide(spec.models, spec.prefixes, located, spec.settings.units)
    units = found.unit_of
    # Integers have no NaN to rest as, so they stay whole.
    frozen = [t for t in located if t not in named and t.can_rest]
    parameters = ShardedParameters(
        named,
        _buckets(spec, [_spec(spec, t, owners[t.parameter], units[t.parameter]) for t in named]),
        frozen,
        _buckets(spec, [_spec(spec, t, None, units[t.parameter]) for t in frozen]),
        spec.shard_group,
        factory,
        partial(initial_values.value_of, group=spec.data_group, peers=spec.peers),
    )
    residency = unit_assignment.make_residency(
        found, parameters, spec.gather_group, spec.gather_order
    )
    unit_assignment.open_doors(found, residency, spec.unit_hooks)
    return parameters, ShardedUnits(found, residency, unit_assignment.refuse_copies(found))


def _spec(
    spec: EngineSpec, named: NamedParameter, owner: ParameterGroup | None, unit: int
) -> bucket_layout.Spec:
    """A parameter for the layout; it is frozen where no group owns it."""
    number = -1 if owner is None else spec.optimizers.index(owner.optimizer)
    return bucket_layout.Spec(
        name=named.name,
        numel=named.parameter.numel(),
        itemsize=named.dtype.itemsize,
        key=(
            *(unit, number, owner and owner.index, named.dtype, named.device),
            spec.stage_of(named.parameter),
            named.shard is not None,
        ),
        whole=owner is not None and owner.whole,
        room=None if named.shard is None else named.shard.most,
    )


def _buckets(spec: EngineSpec, specs: Sequence[bucket_layout.Spec]) -> list[bucket_layout.Bucket]:
    capacity = int(spec.settings.bucket_mb * 2**20)
    buckets = bucket_layout.lay_out(
        specs, ranks=spec.shard_group.size, capacity=capacity, grain=spec.summation.grain
    )
    bucket_layout.check(buckets, specs, spec.shard_group.size)
    return buckets
