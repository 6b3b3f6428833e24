"""Lists all tensors in an engine's checkpoint, and the spans that this rank holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, TypeVar

from torch import Tensor, nn, optim

from shardwise.checkpoint import tensor_spans
from shardwise.checkpoint.attribute_values import AttributeValues
from shardwise.checkpoint.extra_sets import ExtraSets
from shardwise.checkpoint.format import TensorSpec, dtype_name
from shardwise.checkpoint.spec_view import SpecView, StatesView
from shardwise.checkpoint.tensor_spans import (
    GROUP,
    OUTER,
    ReportedState,
    StoredTensors,
    TensorSpans,
)
from shardwise.comm import Solo
from shardwise.layout.bucket_layout import DATA, EXPERT_COPIES
from shardwise.layout.shards import Shard
from shardwise.model.optimizer_access import held
from shardwise.states.optimizer.existing_optimizer_state import Blank
from shardwise.states.optimizer.optimizer_kind import OptimizerKind, placed
from shardwise.states.optimizer.optimizer_trial import examine

T = TypeVar("T")


@dataclass(frozen=True)
class Inventory:
    """The tensors of an engine's models, in registration order.

    Args:
        names: All names of each tensor, keyed by the first one, under which the tensor is saved.
        buffers: Buffers on this rank, by name.
        parameters: Dtype and full (unsplit) shape of each parameter, by name.
    """

    names: dict[str, list[str]]
    buffers: dict[str, Tensor]
    homes: dict[str, nn.Module]
    """The module that owns each tensor, by the tensor's name."""
    whole: dict[str, Tensor]
    """Parameters outside of flat buffers: neither trained nor sharded by ZeRO."""
    parameters: dict[str, TensorSpec]

    @property
    def aliases(self) -> dict[str, str]:
        """Map from each alias of a tied weight to its first name."""
        return {alias: first for first, all_names in self.names.items() for alias in all_names[1:]}


def take_inventory(spec: SpecView, states: StatesView) -> Inventory:
    parameters = states.parameters
    # Parameters in flat buffers. With ZeRO-3 their own tensors may currently be empty.
    forms = {t.parameter: t for t in parameters.named}
    forms |= {t.parameter: t for slab in parameters.frozen for t in slab.named}
    names: dict[int, list[str]] = {}
    buffers: dict[str, Tensor] = {}
    # Identify tensors by id, because a tied weight is one tensor with several names.
    homes: dict[str, nn.Module] = {}
    by_id: dict[int, Any] = {}
    for name, value, module in _named_tensors(spec):
        homes.setdefault(name, module)
        names.setdefault(id(value), []).append(name)
        by_id[id(value)] = value
    for named in spec.located():  # adds parameters that only an optimizer holds
        names.setdefault(id(named.parameter), [named.name])
        by_id[id(named.parameter)] = named.parameter
    specs: dict[str, TensorSpec] = {}
    whole: dict[str, Tensor] = {}
    for number, (first, *_) in names.items():
        value = by_id[number]
        if value in forms:
            form = forms[value]
            specs[first] = TensorSpec(first, dtype_name(form.dtype), tuple(form.whole_shape))
        elif isinstance(value, nn.Parameter):
            specs[first] = spec_of(first, value, spec.shard_of(value))
            if spec.is_here(value):
                whole[first] = value
        else:
            buffers[first] = value
    known = {all_names[0]: all_names for all_names in names.values()}
    return Inventory(known, buffers, homes, whole, specs)


def _named_tensors(spec: SpecView) -> Iterator[tuple[str, Tensor, nn.Module]]:
    """Yield (name, tensor, owning module) for each tensor that state_dict() would contain."""
    for model, prefix in zip(spec.models, spec.prefixes, strict=True):
        # Include duplicates, because the file lists every name of a tied weight.
        for path, module in model.named_modules(remove_duplicate=False):
            buffers = {
                key: buffer
                for key, buffer in module._buffers.items()
                if key not in module._non_persistent_buffers_set
            }
            for key, value in [*module._parameters.items(), *buffers.items()]:
                if value is not None:
                    name = ".".join(part for part in (prefix, path, key) if part)
                    # Names in the file must not depend on whether a module is compiled.
                    yield name.replace("_orig_mod.", ""), value, module


def spec_of(name: str, value: Tensor, shard: Shard | None = None) -> TensorSpec:
    """Return the spec of `value`, or of the full tensor if `value` is only its part `shard`."""
    shape = tuple(value.shape) if shard is None else shard.shape
    return TensorSpec(name, dtype_name(value.dtype), shape)


def optimizer_specs(engine_tensors: EngineTensors, reported: ReportedState) -> list[TensorSpec]:
    """Return the specs of the optimizer state, including masters in a different dtype."""
    states, specs = engine_tensors.states, []
    # A master in its parameter's dtype is the parameter itself, so it is saved only once.
    named = states.parameters.named
    masters = {
        slot.parameter: part.master.dtype
        for part in states.optimizer.intervals
        if part.master.dtype != part.target.dtype and not part.master.is_derived
        for slot in part.bucket.slots
    }
    for number, form in enumerate(named):
        if number in masters:
            name = tensor_spans.state_name(form.name, tensor_spans.MASTER)
            specs.append(TensorSpec(name, dtype_name(masters[number]), tuple(form.whole_shape)))
        for key, entry in sorted(reported.states.get(number, {}).items()):
            if isinstance(entry, Blank):
                name = tensor_spans.state_name(form.name, key)
                specs.append(TensorSpec(name, dtype_name(entry.dtype), entry.shape))
    for frozen in engine_tensors.frozen_states:
        for key, value in sorted(frozen.tensors.items()):
            shard = engine_tensors.spec.state_shard_of(frozen.parameter, key, value)
            specs.append(spec_of(tensor_spans.state_name(frozen.name, key), value, shard))
    return specs


def average_specs(states: StatesView) -> list[TensorSpec]:
    """Return the specs of the moving averages, or [] if the engine has none."""
    if states.averages is None:
        return []
    dtypes = {
        slot.parameter: held.dtype
        for part, held in zip(states.optimizer.intervals, states.averages.storages, strict=True)
        for slot in part.bucket.slots
    }
    return [
        TensorSpec(parameter.name, dtype_name(dtypes[number]), tuple(parameter.whole_shape))
        for number, parameter in enumerate(states.parameters.named)
    ]


class _Group:
    """A parameter group of an optimizer. The trial that determines its kind runs on first use."""

    def __init__(self, optimizer: optim.Optimizer, options: dict[str, Any]) -> None:
        self.optimizer = optimizer
        self.options = options

    @cached_property
    def kind(self) -> OptimizerKind:
        """The kind of optimizer that updates this group."""
        # All parameters in a group are updated in the same way, so one is enough for the trial.
        device = self.options["params"][0].device
        return examine(self.optimizer, self.options, device, is_copied=False)


@dataclass(frozen=True)
class FrozenState:
    """Optimizer state of a frozen parameter that is still in an optimizer's parameter group.

    The state stays unsharded in the user's optimizer until the parameter is trained again.
    """

    name: str
    parameter: nn.Parameter
    group: _Group

    @property
    def tensors(self) -> dict[str, Tensor]:
        """State entries that are treated as tensors when the parameter is trained, by key."""
        state = self._state
        if not state:
            return {}
        kind, shape = self.group.kind, self.parameter.shape
        return {k: v for k, v in sorted(state.items()) if kind.is_tensor(k, v, shape)}

    @property
    def numbers(self) -> dict[str, Any]:
        """Scalar entries of the state, by key."""
        tensors = self.tensors
        return {k: v for k, v in self._state.items() if k not in tensors}

    @property
    def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = held(self.group.optimizer).get(self.parameter, {})
        return state

    def take(self, state: Mapping[str, Any]) -> None:
        """Replace the parameter's optimizer state with `state`."""
        # If `state` is empty, only remove the old one. The optimizer then creates a new state.
        held(self.group.optimizer).pop(self.parameter, None)
        if state:
            device = self.parameter.device
            held(self.group.optimizer)[self.parameter] = {
                key: placed(key, value, device, self.group.options) for key, value in state.items()
            }


def _frozen_states(spec: SpecView, states: StatesView) -> Iterator[FrozenState]:
    """Yield a FrozenState for each frozen parameter in the optimizers' parameter groups."""
    trained = {named.parameter for named in states.parameters.named}
    names = {named.parameter: named.name for named in spec.located()}
    for optimizer in spec.optimizers:
        for group in (_Group(optimizer, options) for options in optimizer.param_groups):
            for parameter in group.options["params"]:
                if parameter not in trained and spec.is_here(parameter):
                    yield FrozenState(names[parameter], parameter, group)


def _position(rank: int, selected: list[bool]) -> tuple[int, int]:
    """Return the position of `rank` among the selected ranks, and the number of selected ranks.

    Args:
        selected: For each rank, whether it is selected.
    """
    return sum(selected[:rank]), sum(selected)


def _all_hold(*conditions: list[bool]) -> list[bool]:
    """Return for each rank whether all `conditions` (lists with one value per rank) are true."""
    return [all(flags) for flags in zip(*conditions, strict=True)]


class EngineTensors:
    """The tensors that this rank saves or loads. The constructor is collective.

    Args:
        spec: Specification of the engine.
        states: States of the engine.
        extra_sets: Tensors and fields that a feature adds.
        attributes: Attributes of each optimizer. Empty when loading.
    """

    def __init__(
        self,
        spec: SpecView,
        states: StatesView,
        extra_sets: ExtraSets,
        attributes: Sequence[AttributeValues | None] = (),
    ) -> None:
        self.spec = spec
        self.states = states
        self.attributes = attributes
        self.inventory = take_inventory(spec, states)
        self.frozen_states = list(_frozen_states(spec, states))
        run = spec.world_group
        self.attribute_specs, self._attribute_copies = self._share_attributes()
        # Gather the coordinates of every rank in one collective: which part of each tensor it has,
        # which layers, which shard, which of the groups with separate weights, and which island.
        copies = spec.shard_groups.expert_copies
        groups = spec.shard_group, spec.apart, spec.peers, copies or spec.shard_group
        coordinates = (
            *(spec.tensor_rank, spec.expert_rank, spec.pipeline_rank),
            *(group.rank for group in groups),
        )
        lane, experts, near, shared, home, peer, shared_experts = (
            [other == own for other in column]
            for own, column in zip(
                coordinates, zip(*run.gather_objects(coordinates), strict=True), strict=True
            )
        )

        def places(*conditions: list[bool]) -> dict[str | None, tuple[int, int]]:
            # The ranks with the same experts share them, not all data-parallel ranks.
            of_experts = [shared_experts if each is shared else each for each in conditions]
            return {
                None: _position(run.rank, _all_hold(near, *conditions)),
                DATA: _position(run.rank, _all_hold(near, lane, *conditions)),
                EXPERT_COPIES: _position(run.rank, _all_hold(near, experts, *of_experts)),
            }

        # Ranks that hold the same elements divide the writing among themselves. `_among` is for
        # sharded states, `_everywhere` for states that are not sharded. Parameters are identical in
        # all groups of ranks, but optimizer state only within a group (`home`).
        self._among, self._everywhere = places(shared), places()
        among_own, self._everywhere_own = places(shared, home), places(home)
        # If the optimizer state is replicated, all ranks hold it, so all of them write a share.
        scattered = spec.placement.is_sharded("optimizer")
        self.trained = TensorSpans(
            states.parameters,
            states.optimizer,
            states.averages,
            spec.shard_group,
            scattered=scattered,
            # No rank has all experts, and ranks of a replica may have different ones.
            reporters=None if copies is None else spec.stage_group,
            among=self._among if scattered else self._everywhere,
            among_own=among_own if scattered else self._everywhere_own,
        )
        self._everywhere_peers = places(peer)
        self.extra_places = {OUTER: self._among, GROUP: places(shared, peer)}
        self._extra_sets = extra_sets
        self.extra = extra_sets.tensors(self.extra_places)

    def _share_attributes(self) -> tuple[list[TensorSpec], tuple[int, int] | None]:
        """Return the specs of the attributes' tensors, and this rank's position among the writers.

        The position is (index, number of writers), or None if this rank does not write them.
        Collective unless no optimizer has attributes.
        """
        # Whether an optimizer has attributes depends only on its class, so all ranks skip the
        # collective or none does.
        run = self.spec.world_group
        if all(values_of_optimizer is None for values_of_optimizer in self.attributes):
            return [], None
        values = self._attribute_tensors
        everywhere = run.gather_objects([spec_of(name, value) for name, value in values.items()])
        first = everywhere[0]
        if self.spec.has_separate_steps or any(
            values_of_optimizer != first for values_of_optimizer in everywhere
        ):
            # Ranks disagree, so write only rank 0's values, which are consistent with each other.
            return first, (0, 1) if run.rank == 0 else None
        # The tensors are the same on all ranks, so each rank writes a share.
        return first, (run.rank, run.size)

    @property
    def _attribute_tensors(self) -> dict[str, Tensor]:
        return {
            n: v
            for values in self.attributes
            if values is not None
            for n, v in values.tensors.items()
        }

    def set_of(self, kind: str, group: int | None = None) -> str:
        """Return the name of the set for tensors of `kind` in `group` (default: this rank's)."""
        return self._extra_sets.set_name(kind, self.spec.peers.rank if group is None else group)

    @property
    def optimizer_names(self) -> dict[nn.Parameter, str]:
        """Names of all parameters in the optimizers' parameter groups, both trained and frozen."""
        # With a pipeline, groups contain the parameters of all layers, but this rank has only its
        # own layers' states.
        if self.spec.pipeline is not None:
            return {named.parameter: named.name for named in self.spec.located()}
        names = {named.parameter: named.name for named in self.states.parameters.named}
        return names | {frozen.parameter: frozen.name for frozen in self.frozen_states}

    @property
    def own_buffers(self) -> dict[str, Tensor]:
        """The buffers that this rank writes. Only the first rank that holds a buffer writes it."""
        return {} if self.spec.peers.rank > 0 else self._buffers_of_group

    @property
    def extra_buffers(self) -> dict[str, Tensor]:
        """The buffers that this rank writes into its group's own set."""
        return {} if self.extra is None else self.extra.buffers(self._buffers_of_group)

    @property
    def _buffers_of_group(self) -> dict[str, Tensor]:
        # All ranks of a stage hold the same buffers, so only the first one writes them.
        if self.spec.stage_group.rank > 0:
            return {}
        homes = self.inventory.homes
        return {n: b for n, b in self.inventory.buffers.items() if self.spec.runs(homes[n])}

    def gather_from_layers(self, value: T) -> list[T]:
        """Gather `value` from the pipeline's ranks, in layer order. Collective."""
        pipeline = self.spec.pipeline
        return [value] if pipeline is None else pipeline.group.gather_objects(value)

    def frozen(self) -> Iterator[StoredTensors]:
        """Yield this rank's spans of frozen parameters that are sharded or in 4 bits."""
        sharded = self.spec.placement.is_sharded("parameters")
        for slab in self.states.parameters.frozen:
            among = self._among if sharded else self._everywhere
            yield tensor_spans.of_sharded_bucket(slab, among)

    def beside(self) -> Iterator[StoredTensors]:
        """Yield this rank's spans of everything that is not trained.

        These are frozen parameters and their optimizer state, tensors in optimizers' attributes,
        buffers, and extra sets.
        """
        yield from self.frozen()
        if self.extra is not None:
            yield from self.extra
        for frozen in self.frozen_states:
            for key, value in frozen.tensors.items():
                name = tensor_spans.state_name(frozen.name, key)
                shard = self.spec.state_shard_of(frozen.parameter, key, value)
                kind = tensor_spans.OPTIMIZER
                yield self._tensor(name, value, frozen.parameter, shard, kind)
        for name, value in self.inventory.whole.items():
            yield self._tensor(name, value, value, self.spec.shard_of(value))
        if self._attribute_copies is not None:
            for name, value in self._attribute_tensors.items():
                copies = self._attribute_copies
                yield tensor_spans.of_tensor(name, value, *copies, tensor_spans.ATTRIBUTES)
        for name, value in self.own_buffers.items():
            yield tensor_spans.of_tensor(name, value, 0, 1)
        for name, value in self.extra_buffers.items():
            yield tensor_spans.of_tensor(name, value, 0, 1, GROUP)

    def _tensor(
        self,
        name: str,
        value: Tensor,
        parameter: Tensor,
        shard: Shard | None,
        kind: str = tensor_spans.MODEL,
    ) -> StoredTensors:
        """Return the span of the unsharded tensor `value`: a parameter or part of its state."""
        axis = None if shard is None else self.spec.axis_of(parameter)
        return tensor_spans.of_tensor(name, value, *self._copies(kind, axis), kind, shard)

    def _copies(self, kind: str, axis: str | None = None) -> tuple[int, int]:
        """Return (index of this rank, number of ranks) among the holders of an unsharded tensor."""
        own = {tensor_spans.OPTIMIZER: self._everywhere_own, GROUP: self._everywhere_peers}
        return own.get(kind, self._everywhere)[axis]

    def out_of_order(self, reported: ReportedState) -> set[tuple[str, str]]:
        """Return (kind, name) of each tensor whose memory order differs from its element order."""
        frozen = [t for slab in self.states.parameters.frozen for t in slab.named]
        odd = {(tensor_spans.MODEL, named.name) for named in frozen if not named.in_order}
        apart = set() if self.extra is None else self.extra.out_of_order()
        return self.trained.out_of_order(reported) | odd | apart

    def reordered(self, reported: ReportedState) -> Iterator[StoredTensors]:
        """Yield the spans of the tensors in `out_of_order`, in element order. Collective."""
        # Tensors that tensor parallelism has split are always in element order.
        beside = () if self.extra is None else self.extra.reordered()
        for kind, name, value in chain(self.trained.reordered(reported), beside):
            yield tensor_spans.of_tensor(name, value, *self._copies(kind), kind)
        for slab in self.states.parameters.frozen:
            sharded = self.spec.placement.is_sharded("parameters")
            group = self.spec.shard_group if sharded else Solo()
            for named, value in tensor_spans.reordered_bucket(slab, group):
                copies = self._copies(tensor_spans.MODEL)
                yield tensor_spans.of_tensor(named.name, value, *copies)
