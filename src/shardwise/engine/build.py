"""Builds an engine's states (parameters, gradients, optimizer state), and dismantles them again."""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn, optim

from shardwise.comm import Solo, SurvivorGroup
from shardwise.config import flag
from shardwise.engine import initial_values, unit_assignment, usage_checks
from shardwise.engine.engine_spec import EngineSpec
from shardwise.engine.unit_assignment import Sections
from shardwise.errors import ModelError, UsageError
from shardwise.layout import bucket_layout
from shardwise.layout.bucket_layout import EXPERT_COPIES
from shardwise.layout.placement import STATES
from shardwise.layout.shards import Shard
from shardwise.model import sync_batch_norm
from shardwise.model.module_hooks import Hooked
from shardwise.model.optimizer_access import held
from shardwise.states.gradients.gradients import Gradients
from shardwise.states.optimizer.ema import Averages
from shardwise.states.optimizer.interval_gather import IntervalGather
from shardwise.states.optimizer.optimizer_kind import OptimizerKind, is_known
from shardwise.states.optimizer.optimizer_options import ParameterGroup
from shardwise.states.optimizer.optimizer_state import OptimizerState
from shardwise.states.parameters.named_parameters import NamedParameter
from shardwise.states.parameters.parameters import Parameters, ReplicatedParameters
from shardwise.states.parameters.quantised_parameters import (
    QuantisedParameters,
    ReplicatedWithQuantised,
)
from shardwise.states.parameters.residency import Residency
from shardwise.states.parameters.sharded_parameters import ShardedParameters
from shardwise.states.second_copies import SecondCopies
from shardwise.states.shard_groups import ShardGroups
from shardwise.states.step_hooks import Kept, StepHooks
from shardwise.states.storage import nf4_storage, quantised_storage
from shardwise.states.storage.storage_factory import StorageFactory


@dataclass(frozen=True)
class ShardedUnits:
    """The units of sharded parameters, with the object that gathers and frees them."""

    sections: Sections
    residency: Residency
    handles: list[Hooked]


@dataclass(frozen=True)
class BucketBytes:
    """A bucket's parameters, and the number of bytes that one rank stores for the bucket.

    `sizes` has one entry per state, in the order of STATES.
    """

    named: Sequence[NamedParameter]
    sizes: tuple[int, int, int]


@dataclass(frozen=True)
class States:
    """The parameters, gradients and optimizer state of an engine.

    `shown` gathers sharded parameters, and is None if parameters are replicated. `averages` is None
    unless `ema_decay` is set. `hooks` is `spec.hooks`. With `--survive`, `copies` are this rank's
    copies of another rank's optimizer state.
    """

    parameters: Parameters
    gradients: Gradients
    optimizer: OptimizerState
    gathering: IntervalGather
    shown: ShardedUnits | None
    storage_factories: dict[str, StorageFactory]
    averages: Averages | None
    hooks: StepHooks | None
    copies: SecondCopies | None

    @property
    def state_bytes(self) -> int:
        """Current size in bytes of this rank's states, including those of `extra_bytes`."""
        gradients = self.gradients.state_bytes
        states = self.parameters.state_bytes + gradients + self.optimizer.state_bytes
        return states + sum(self.extra_bytes().values())

    def extra_bytes(self) -> dict[str, int]:
        """Return the sizes in bytes of averages, second copies and anchor, by name.

        Omits any that do not exist or are empty.
        """
        kept = {
            "averages": self.averages,
            "second copies": self.copies,
            "" if self.hooks is None else self.hooks.bytes_name: self.hooks,
        }
        return {name: x.state_bytes for name, x in kept.items() if x and x.state_bytes}

    def buckets_by(self, key: Callable[[nn.Parameter], int]) -> dict[int, frozenset[int]]:
        """Return bucket indices, grouped by the value of `key` for the buckets' parameters."""
        buckets_of: dict[int, set[int]] = defaultdict(set)
        for number, bucket in enumerate(self.parameters.buckets):
            for slot in bucket.slots:
                buckets_of[key(self.parameters.named[slot.parameter].parameter)].add(number)
        return {value: frozenset(numbers) for value, numbers in buckets_of.items()}

    def expected_bytes(self) -> int:
        """Return what `state_bytes` will be once the optimizers have created all their state."""
        return sum(self.extra_bytes().values()) + sum(self.bytes_by_state().values())

    def bytes_by_state(self) -> dict[str, int]:
        """Return the expected size in bytes of each of STATES on this rank, summed over tiers.

        Excludes averages, second copies and anchor.
        """
        sizes = zip(*(bucket.sizes for bucket in self.bytes_by_bucket()), strict=True)
        return dict(zip(STATES, map(sum, sizes), strict=True))

    def bytes_by_bucket(self) -> list[BucketBytes]:
        """Return the expected size of each bucket in bytes.

        The list ends with entries for sharded frozen parameters, which are in no bucket.
        """
        parameters, buckets = self.parameters, self.gradients.buckets
        trained = [
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
        return trained + [BucketBytes(named, (nbytes, 0, 0)) for named, nbytes in frozen]


def build(
    spec: EngineSpec,
    masters: Mapping[nn.Parameter, Tensor],
    averages: Mapping[nn.Parameter, Tensor] | None = None,
    anchor: Kept | None = None,
) -> States:
    """Create the states for the models and optimizers of `spec`. Collective.

    Args:
        spec: The models, optimizers, settings and process groups.
        masters: Known fp32 values of 16-bit parameters. Other masters start from the parameters.
        averages: EMA values to continue from, or None to start from the parameters.
        anchor: Anchor values to continue from, with islands.
    """
    owners = _owners(spec)
    everything = spec.located()
    _check_trainable(everything, owners, main=spec.world_group.rank == 0)
    located = [t for t in everything if spec.is_here(t.parameter)]
    # Keep a frozen parameter in the layout if it has an average, which must not be lost. Keep one
    # with an anchor too, because its values differ between islands until they are averaged again.
    kept = {*(averages or {}), *(p for values in (anchor or {}).values() for p in values)}
    named = [
        t
        for t in located
        if t.parameter in owners and (t.parameter.requires_grad or t.parameter in kept)
    ]
    storage_factories = {
        state: StorageFactory(spec.placement.tier(state), spec.shard_group) for state in STATES
    }
    scattered = spec.placement.is_sharded("optimizer")
    everyone = spec.world_group
    # No other rank can use the copies if the loss of one rank ends the run.
    continues = isinstance(everyone, SurvivorGroup) and everyone.divisions.unit < everyone.size
    has_copies = continues and scattered
    # Look at all stages of a pipeline, so that all ranks raise.
    dtypes = {t.dtype for t in everything if t.parameter in owners}
    if spec.settings.rounds_masters and torch.bfloat16 not in dtypes:
        raise ModelError(
            "--optimizer-state 8bit-bf16 updates bf16 parameters without fp32 masters, but no "
            "trained parameter is bf16. Add --precision bf16, or write --optimizer-state 8bit."
        )
    factory = storage_factories["parameters"]
    parameters, shown = _parameters(spec, located, named, owners, factory, copies=has_copies)
    gradients = _gradients(spec, parameters, shown, storage_factories["gradients"])
    quantised = spec.settings.quantises_state
    # All parameters of a bucket are in the same parameter group, because `_spec` puts the group
    # into the key.
    groups = [owners[named[bucket.slots[0].parameter].parameter] for bucket in parameters.buckets]
    copies = None
    if has_copies:
        # First, because the optimizer state below takes existing state from the user's optimizer.
        factory = storage_factories["optimizer"]
        copies = SecondCopies(
            parameters, groups, gradients.buckets, factory, dict(masters), spec.shard_groups
        )
    optimizer = OptimizerState(
        parameters,
        groups,
        gradients.buckets,
        storage_factories["optimizer"],
        # State on a disk is read span by span, and the other states are updated in the same spans.
        # Quantised state has full precision for one span at a time.
        by_spans=quantised or any(factory.on_disk for factory in storage_factories.values()),
        quantised=quantised,
        rounds=spec.settings.rounds_masters,
        # With replicated parameters and sharded optimizer state, ranks must exchange updates.
        sends=scattered
        and not spec.placement.is_sharded("parameters")
        and spec.shard_group.size > 1,
        known=masters,
        split=spec.tensor,
    )
    # Averages are stored and sharded like the optimizer state.
    decay, moving = spec.settings.ema_decay, None
    if decay is not None:
        held = storage_factories["optimizer"]
        moving = Averages(parameters, optimizer, decay, held, scattered=scattered, start=averages)
    if spec.hooks is not None:
        held = storage_factories["optimizer"]
        spec.hooks.lay_out(parameters, gradients, optimizer, held, anchor)
    return States(
        parameters,
        gradients,
        optimizer,
        IntervalGather(
            parameters,
            optimizer,
            spec.shard_groups,
            scattered=scattered,
            share_split_keys=None
            if spec.tensor is None
            else partial(spec.tensor.share_split_keys, spec.shard_group, spec.optimizers),
        ),
        shown,
        storage_factories,
        moving,
        spec.hooks,
        copies,
    )


def _gradients(
    spec: EngineSpec, parameters: Parameters, shown: ShardedUnits | None, factory: StorageFactory
) -> Gradients:
    """Create the gradients of `parameters`, and set when a bucket's reduction may be launched."""
    gradients = Gradients(
        parameters,
        spec.placement,
        spec.shard_groups,
        factory,
        spec.summation,
        overlap=spec.settings.overlap,
        exact_sum=spec.settings.reduce_dtype == "fp32",
        stray=usage_checks.stray_backward,
        elsewhere=_counted_elsewhere(spec, parameters),
    )
    if shown is not None and spec.placement.is_sharded("parameters"):
        # With sharded parameters, launch a unit's buckets only once all ranks have passed the unit
        # in the backward pass. Otherwise a rank could wait in a bucket for one waiting in a gather.
        buckets: dict[int, list[int]] = defaultdict(list)
        for number, bucket in enumerate(parameters.buckets):
            first = parameters.named[bucket.slots[0].parameter].parameter
            buckets[shown.sections.unit_of[first]].append(number)
        gradients.paced = shown.residency.pace(lambda unit: gradients.start(buckets[unit]))
    # Synchronised BatchNorm waits for other ranks inside the backward pass. With sharded parameters
    # its collectives follow the same order as gathers. Otherwise, the backward pass must not wait
    # for a bucket's reduction: a rank that has not used the same parameters may be waiting in
    # BatchNorm for this one.
    # Experts of other ranks wait for this rank's rows in the same way.
    # So does attention over parts of sequences.
    splits = spec.experts is not None or spec.context is not None
    waits = bool(sync_batch_norm.converted(spec.models)) or splits
    gradients.patient = gradients.paced or not waits
    return gradients


def _counted_elsewhere(spec: EngineSpec, parameters: Parameters) -> set[int]:
    """Return the indices of the buckets that this rank leaves out of the gradient norm.

    Every tensor-parallel rank holds these buckets in full, so only rank 0 includes them.
    """
    if spec.tensor_rank == 0:
        return set()
    return {
        number
        for number, bucket in enumerate(parameters.buckets)
        if parameters.named[bucket.slots[0].parameter].shard is None
    }


def take_apart(
    spec: EngineSpec, states: States
) -> tuple[dict[Any, Tensor], dict[Any, Tensor] | None, Kept | None]:
    """Move parameters and optimizer state back into the user's objects. Collective.

    Returns masters, averages and anchor in the form that `build` accepts.
    """
    # Gather everything first: `release` frees the flat buffers that hold the values.
    masters = states.gathering.masters()
    averages = states.gathering.tensors(states.averages.loaded()) if states.averages else None
    anchor = None
    if states.hooks is not None:
        anchor = states.hooks.take_apart(states.parameters, states.gathering)
    give_back(spec, states, states.gathering.optimizer_state())
    return masters, averages, anchor


def give_back(
    spec: EngineSpec,
    states: States,
    gathered: Mapping[nn.Parameter, dict[str, Any]],
    values: Mapping[nn.Parameter, Tensor] | None = None,
) -> None:
    """Move parameters and their `gathered` optimizer state back into the user's objects.

    Collective if parameters are sharded, unless `values` provides their full values.
    """
    for parameter, state in gathered.items():
        for optimizer in spec.optimizers:
            if any(parameter is p for group in optimizer.param_groups for p in group["params"]):
                held(optimizer)[parameter] = state
    states.optimizer.return_common_state()
    states.gradients.detach()
    if states.shown is not None:
        states.shown.residency.close()
        for handle in states.shown.handles:
            handle.remove()
    states.parameters.release(values)
    # Close the files last, when no state needs them any more.
    for factory in states.storage_factories.values():
        factory.close()


def _owners(spec: EngineSpec) -> dict[nn.Parameter, ParameterGroup]:
    """Return the parameter group that trains each parameter.

    Raises ModelError if a parameter is in two groups, or if an optimizer has state that cannot be
    sharded.
    """
    owners: dict[nn.Parameter, ParameterGroup] = {}
    kinds = spec.optimizer_kinds
    for optimizer in spec.optimizers:
        for index, options in enumerate(optimizer.param_groups):
            if not options["params"]:
                continue
            # If possible, let an unknown optimizer keep its own parameters, because it may depend
            # on their number, order or identity.
            stays = spec.optimizers_stay and not is_known(optimizer)
            leading = options["params"][0]
            device = spec.device if leading.is_meta else leading.device
            # With sharded state, also try an unknown optimizer on a copy: it is rejected, and the
            # trial shows why.
            is_copied = not stays or spec.placement.is_sharded("optimizer")
            kind = kinds.of(optimizer, options, device, is_copied=is_copied)
            shards = [p for p in options["params"] if spec.shard_of(p) is not None]
            _check_kind(spec, type(optimizer).__name__, kind, shards, index)
            if spec.settings.quantises_state:
                _check_quantised(optimizer, kind, spec.settings.optimizer_state)
            # Without sharding, don't rely on a trial that classified the optimizer as elementwise.
            as_given = not kind.known and not shards and spec.cuts_nothing
            for parameter in options["params"]:
                if parameter in owners:
                    first, second = type(owners[parameter].optimizer), type(optimizer)
                    raise ModelError(
                        f"A parameter of shape {tuple(parameter.shape)} is in two parameter groups "
                        f"({first.__name__} and {second.__name__}): pass each parameter to one "
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


def _check_quantised(optimizer: optim.Optimizer, kind: OptimizerKind, choice: str) -> None:
    """Raise ModelError if the state of `optimizer` cannot be stored in 8 bits."""
    name = type(optimizer).__name__
    if not kind.known or not kind.elementwise:
        reason = "it stores the state of torch's own optimizers that update each element by itself"
    elif not kind.tensor_keys:
        reason = f"{name} with these options keeps no state"
    elif unknown := sorted(kind.tensor_keys - quantised_storage.SIGNED_KEYS.keys()):
        reason = f"rounding the {unknown[0]} of {name} would change what it computes"
    else:
        return
    raise ModelError(
        f"--optimizer-state {choice} does not support this {name}: {reason}. Train with "
        "torch.optim.AdamW, Adam, NAdam, RAdam, Adamax, RMSprop, or with SGD with momentum, or "
        "remove the flag."
    )


def _check_kind(
    spec: EngineSpec, name: str, kind: OptimizerKind, shards: Sequence[Tensor], group: int
) -> None:
    """Raise ModelError if an optimizer of this `kind` cannot update parts of tensors.

    `shards` are the tensors in parameter group `group` that tensor or expert parallelism splits.
    """
    # Experts are split between tensors, so an optimizer of whole tensors still gets them.
    partial = [p for p in shards if (shard := spec.shard_of(p)) is not None and shard.is_partial]
    of_experts = sum(spec.axis_of(p) == EXPERT_COPIES for p in partial)
    of_layers = len(partial) - of_experts
    if not kind.separable and spec.placement.is_sharded("optimizer"):
        raise ModelError(
            f"{name} combines values of several tensors in its update, so its state cannot be "
            f"sharded ({spec.placement.name}). Train with --zero 0, or use an optimizer that "
            "updates each tensor independently."
        )
    if not kind.separable and spec.pipeline is not None:
        raise ModelError(
            f"{name} combines values of several tensors in its update, but with --pipeline no "
            "worker has all tensors. Use an optimizer that updates each tensor independently, or "
            "start without --pipeline."
        )
    if not kind.elementwise and of_experts:
        raise ModelError(
            f"{name} needs whole tensors, but --expert {spec.settings.expert} splits {of_experts} "
            f"of group {group}, which hold several experts. Use an element-wise optimizer such as "
            "AdamW for them, or start without --expert."
        )
    if not kind.separable and spec.experts is not None:
        raise ModelError(
            f"{name} looks across tensors, but with --expert no worker has all of them. Use an "
            "optimizer that updates each tensor independently, or start without --expert."
        )
    if not kind.separable and of_layers:
        raise ModelError(
            f"{name} combines values of several tensors in its update, but --tensor "
            f"{spec.settings.tensor} splits {of_layers} of group {group}. Use an optimizer that "
            "updates each tensor independently, or start without --tensor."
        )
    if not kind.elementwise and of_layers and spec.settings.survive:
        raise ModelError(
            f"{name} needs whole tensors, but --tensor {spec.settings.tensor} splits {of_layers} "
            f"of group {group}. With --survive {spec.settings.survive}, the other workers could "
            "not finish such an update after a loss. Use an element-wise optimizer such as AdamW, "
            "or start without --survive."
        )
    tiers = {n: getattr(spec.settings, n) for n in _OFFLOADS}
    on_disk = [name for name, tier in tiers.items() if tier is not None and tier.kind == "nvme"]
    if not on_disk:
        return
    # If any state is on a disk, the update runs in spans, even if the optimizer state is in memory.
    given = " and ".join(f"{flag(name)} {tiers[name]}" for name in on_disk)
    instead = f"Write {' '.join(f'{flag(name)} cpu' for name in on_disk)}"
    if not kind.elementwise:
        raise ModelError(
            f"{name} needs whole tensors, but with {given} each update gets a part. {instead}, "
            "or use an element-wise optimizer such as AdamW."
        )
    if kind.attributes:
        raise ModelError(
            f"{name} changes its attribute {min(kind.attributes)} in every call of step, but with "
            f"{given} there are several calls per step. {instead}, or change the optimizer to "
            "keep the value per parameter, in self.state."
        )


_OFFLOADS = ("offload_params", "offload_gradients", "offload_optimizer")


def _check_trainable(
    located: Sequence[NamedParameter], owners: Mapping[nn.Parameter, ParameterGroup], *, main: bool
) -> None:
    if not any(t.parameter.requires_grad for t in located):
        raise ModelError(
            "The model has no trainable parameter (all have requires_grad=False, or there are "
            "none), so there is nothing to train."
        )
    lost = [t.name for t in located if t.parameter.requires_grad and t.parameter not in owners]
    if len(lost) == sum(t.parameter.requires_grad for t in located):
        raise ModelError(
            "No optimizer has a trainable parameter of the model: pass model.parameters() to the "
            "optimizer."
        )
    # Warn only on the main rank: all ranks build the same model and would repeat the message.
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
    *,
    copies: bool,
) -> tuple[Parameters, ShardedUnits | None]:
    """Create the parameters for the placement and, if sharded, the units that gather them.

    Also creates units if frozen weights are stored in 4 bits.
    """
    quantised = spec.quantised_weights
    if trained := [t.name for t in named if t.parameter in quantised]:
        # A checkpoint would not say that this weight has its full precision, so a resumed run
        # would round what it has learned.
        raise UsageError(
            f"{trained[0]} is stored in 4 bits (--frozen-weights nf4) and was unfrozen after the "
            "engine was created. Unfreeze it before sw.Engine(...), so that it keeps its precision."
        )
    value_of = partial(initial_values.value_of, group=spec.data_group, peers=spec.peers)
    if not spec.placement.is_sharded("parameters"):
        buckets = _buckets(spec, [_spec(spec, t, owners[t.parameter], 0) for t in named])
        published = spec.placement.is_sharded("optimizer")
        if not quantised:
            groups = spec.shard_groups
            return ReplicatedParameters(named, buckets, groups, published=published), None
        frozen = [t for t in located if t.parameter in quantised]
        sections = unit_assignment.divide(spec.models, spec.prefixes, frozen, spec.settings.units)
        specs = [_spec(spec, t, None, sections.unit_of[t.parameter]) for t in frozen]
        narrow = QuantisedParameters(frozen, _buckets(spec, specs, ranks=1), factory, value_of)
        replicated = ReplicatedWithQuantised(
            named, buckets, spec.shard_groups, narrow, published=published
        )
        return replicated, _units(spec, sections, narrow, ShardGroups(Solo()))
    sections = unit_assignment.divide(spec.models, spec.prefixes, located, spec.settings.units)
    units = sections.unit_of
    if copies and sections.sections[-1].module is None:
        raise ModelError(
            "An optimizer has parameters that are in no model. --zero 3 with --survive gathers "
            "parameters for the forward passes of modules only. Put them into a module of the "
            "model, or train with --zero 2."
        )
    # A freed parameter is NaN, so that accidental uses are noticed. Integers have no NaN, so they
    # are not sharded.
    frozen = [t for t in located if t not in named and t.can_rest]
    parameters = ShardedParameters(
        named,
        _buckets(spec, [_spec(spec, t, owners[t.parameter], units[t.parameter]) for t in named]),
        frozen,
        _buckets(spec, [_spec(spec, t, None, units[t.parameter]) for t in frozen]),
        spec.shard_groups,
        factory,
        value_of,
        quantised,
        copies=copies,
    )
    return parameters, _units(spec, sections, parameters, spec.gather_groups)


def _units(
    spec: EngineSpec, sections: Sections, parameters: ShardedParameters, groups: ShardGroups
) -> ShardedUnits:
    """Create the units of `parameters`, and the hooks that gather them in `groups`."""
    residency = unit_assignment.make_residency(sections, parameters, groups, spec.gather_order)
    unit_assignment.attach_unit_hooks(sections, residency, spec.unit_hooks)
    return ShardedUnits(sections, residency, unit_assignment.refuse_copies(sections))


def _spec(
    spec: EngineSpec, named: NamedParameter, owner: ParameterGroup | None, unit: int
) -> bucket_layout.Spec:
    """Describe a parameter to the bucket layout. It is frozen if `owner` is None."""
    number = -1 if owner is None else spec.optimizers.index(owner.optimizer)
    axis = spec.axis_of(named.parameter)
    return bucket_layout.Spec(
        name=named.name,
        numel=named.parameter.numel(),
        itemsize=named.dtype.itemsize,
        key=(
            *(unit, number, owner and owner.index, named.dtype, named.device),
            spec.stage_of(named.parameter),
            named.shard is not None,
            named.parameter in spec.quantised_weights,
        ),
        # Never divide such a tensor between ranks, because its optimizer needs all of its elements.
        whole=owner is not None and owner.whole,
        room=None if named.shard is None else _room(named.shard, axis),
        axis=axis,
    )


def _room(shard: Shard, axis: str) -> int:
    """Return how many elements a split parameter counts as when its bucket's capacity is filled."""
    # Of several experts' parameters in a bucket, a rank holds only a part.
    return -(-shard.most // (len(shard.ranges) if axis == EXPERT_COPIES else 1))


def _buckets(
    spec: EngineSpec, specs: Sequence[bucket_layout.Spec], ranks: int | None = None
) -> list[bucket_layout.Bucket]:
    """Lay out `specs` for `ranks` ranks (default: those that shard the states)."""
    ranks = spec.shard_group.size if ranks is None else ranks
    capacity = int(spec.settings.bucket_mb * 2**20)
    # A quantised block must not contain elements of two ranks or parameters.
    blocks = [quantised_storage.BLOCK] if spec.settings.quantises_state else []
    blocks += [nf4_storage.BLOCK] if spec.settings.quantises_frozen else []
    copies = 1 if spec.experts is None else spec.experts.copies.size
    buckets = bucket_layout.lay_out(
        specs,
        ranks=ranks,
        capacity=capacity,
        grain=math.lcm(spec.summation.grain, *blocks),
        expert_copies=copies,
    )
    # This is cheap, and an error in the layout would silently corrupt training.
    bucket_layout.check(buckets, specs, ranks, copies)
    return buckets
