"""Maps intervals of flat buckets to named tensors, so that checkpoints can read and write them.

An engine's states are intervals of flat buckets. A checkpoint stores tensors by name, and each rank
holds some of their elements. A StoredTensors (a span) describes the tensor elements in such an
interval.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from shardwise.comm import Collectives
from shardwise.layout.bucket_layout import EXPERT_COPIES, Slot
from shardwise.layout.byte_ranges import Extent, extents, of_whole
from shardwise.layout.shards import Shard
from shardwise.states.optimizer.ema import Averages
from shardwise.states.optimizer.existing_optimizer_state import Blank
from shardwise.states.optimizer.interval_gather import gather_bucket, on_host
from shardwise.states.optimizer.optimizer_state import OptimizerState
from shardwise.states.optimizer.update_interval import UpdatedTensor
from shardwise.states.parameters.named_parameters import NamedParameter
from shardwise.states.parameters.parameters import Parameters
from shardwise.states.parameters.sharded_bucket import ShardedBucket
from shardwise.states.storage.storage import MemoryStorage, Storage

MODEL, OPTIMIZER, AVERAGE = "model", "optimizer", "average"
"""Kinds of tensor sets that any checkpoint may contain."""

OUTER, GROUP = "outer", "group"
"""Kinds of extra sets: OUTER is shared by all groups of ranks, and GROUP exists once per group."""

ATTRIBUTES = "attributes"
"""Kind of the set with tensors from optimizers' attributes."""

MASTER = "master"
"""Key of a parameter's fp32 master weights among the optimizer's tensors."""

Places = Mapping[str | None, tuple[int, int]]
"""This rank's position among the ranks that hold the same elements, and their number. The key is
the axis along which a split tensor's bucket is sharded, or None for tensors that are not split."""


@dataclass(frozen=True)
class StoredTensors:
    """A span: a flat interval on this rank that holds elements of tensors of one set.

    Args:
        kind: Kind of the set.
        storage: Storage of the interval.
        extents: Positions of tensor elements in the interval. The rest is padding.
        copy: Index of this rank among the ranks that hold the same interval.
        copies: Number of ranks that hold the same interval.
        as_counted: True if the elements are in their tensor's own order, even if its parameter has
            a different memory order.
    """

    kind: str
    storage: Storage
    extents: Sequence[Extent]
    copy: int = 0
    copies: int = 1
    as_counted: bool = False


@dataclass(frozen=True)
class ReportedState:
    """A description of the optimizer state on all ranks that shard it.

    Args:
        states: Entries by parameter index and key, with a Blank in place of each tensor.
        borders: Indices of the parameters at which optimizer state is cut into segments.
    """

    states: dict[int, dict[str, Any]]
    borders: set[int]


def state_name(name: str, key: str) -> str:
    """Return the name under which a checkpoint stores entry `key` of parameter `name`'s state."""
    return f"{name}.{key}"


class TensorSpans:
    """Yields this rank's spans of trained parameters, masters, optimizer state and averages.

    Args:
        group: Ranks that shard the states, if `scattered` is true.
        scattered: True if the optimizer state is sharded across `group`.
        reporters: Ranks that together hold all parameters, or None if every rank holds all.
        among: This rank's position among the ranks that hold the same elements.
        among_own: This rank's position among the ranks that hold the same optimizer state. Differs
            from `among` if groups of ranks have separate optimizer state.
    """

    def __init__(
        self,
        parameters: Parameters,
        optimizer: OptimizerState,
        averages: Averages | None,
        group: Collectives,
        *,
        scattered: bool,
        reporters: Collectives | None,
        among: Places,
        among_own: Places,
    ) -> None:
        self._parameters = parameters
        self._optimizer = optimizer
        self._averages = averages
        self._group = group
        self._scattered = scattered
        self._reporters = reporters
        self._among = among
        self._among_own = among_own
        self._shards = {
            number: named.shard
            for number, named in enumerate(parameters.named)
            if named.shard is not None
        }

    def reported(self) -> ReportedState:
        """Gather all ranks' descriptions of their optimizer state. Collective."""
        own_report = self._own_states(), self._own_borders()
        # If the state is replicated, this rank has all entries, so no collective is needed.
        group = self._reporters or (self._group if self._scattered else None)
        gathered = [own_report] if group is None else group.gather_objects(own_report)
        states: dict[int, dict[str, Any]] = {}
        for interval, _ in gathered:
            states |= interval
        return ReportedState(states, set().union(*(borders for _, borders in gathered)))

    def _own_states(self) -> dict[int, dict[str, Any]]:
        return on_host(
            {
                piece.parameter: {
                    key: self._entry(index, segment, piece.parameter, key, value)
                    for key, value in state.items()
                }
                for index in range(len(self._optimizer.intervals))
                for segment, state in self._optimizer.state_of(index)
                for piece in segment.pieces
            }
        )

    def _entry(self, index: int, segment: UpdatedTensor, number: int, key: str, value: Any) -> Any:
        if not self._optimizer.is_tensor(index, segment, key, value):
            return value
        flat = self._optimizer.is_flat(index, segment, key, value)
        named = self._parameters.named[number]
        is_split = flat or self._optimizer.is_split(segment, key, value)
        return Blank(tuple(named.whole_shape if is_split else value.shape), value.dtype)

    def _own_borders(self) -> set[int]:
        # A cut at the start of an interval follows from the bucket layout, so it need not be saved.
        return {
            segment.pieces[0].parameter
            for interval, group in zip(
                self._optimizer.intervals, self._optimizer.groups, strict=True
            )
            if not group.whole
            for segment in interval.segments
            if segment.first > interval.own[0] and segment.pieces[0].offset == 0
        }

    def __iter__(self) -> Iterator[StoredTensors]:
        """Yield all of this rank's spans, bucket by bucket."""
        for index in range(len(self._optimizer.intervals)):
            for kind, key, storage in self._intervals(index):
                yield self._span(index, kind, storage, self._extents(index, key))
            yield from self._states(index)

    def _intervals(self, index: int) -> Iterator[tuple[str, str | None, Storage]]:
        """Yield (kind, key, storage) of each state that covers the interval of bucket `index`."""
        interval = self._optimizer.intervals[index]
        yield MODEL, None, interval.target
        # In fp32 training there is no separate master: `master` and `target` are the same storage.
        # Do not test for bytes: an interval may be empty on this rank only, and all ranks must
        # yield the same states.
        if interval.master is not interval.target and not interval.master.is_derived:
            yield OPTIMIZER, MASTER, interval.master
        if self._averages is not None:
            yield AVERAGE, None, self._averages.storages[index]

    def _states(self, index: int) -> Iterator[StoredTensors]:
        interval = self._optimizer.intervals[index]
        # Moments cover the entire interval, but some of its parameters may have no state yet.
        for key, storage in interval.moments.items():
            numbers = {
                piece.parameter
                for segment, state in self._optimizer.state_of(index)
                if key in state
                for piece in segment.pieces
            }
            yield self._span(index, OPTIMIZER, storage, self._extents(index, key, numbers))
        # Every other tensor, such as one of Adafactor's factors, belongs to a single segment.
        for segment, state in self._optimizer.state_of(index):
            for key, value in state.items():
                is_tensor = self._optimizer.is_tensor(index, segment, key, value)
                if key in interval.moments or not is_tensor:
                    continue
                names = {p.parameter: self._name(p.parameter, key) for p in segment.pieces}
                flat = self._optimizer.is_flat(index, segment, key, value)
                named = self._parameters.named[segment.pieces[0].parameter]
                # State with its parameter's shape, such as Muon's momentum, is split with it. All
                # ranks of a replica hold other tensors, such as Adafactor's factors, in full.
                shard = named.shard if self._optimizer.is_split(segment, key, value) else None
                if flat:
                    parts = extents(segment.pieces, segment.first, names, self._shards)
                else:
                    whole = Extent(next(iter(names.values())), 0, value.numel(), 0)
                    parts = [whole] if shard is None else of_whole(whole, shard)
                storage = MemoryStorage(_flat(value))
                in_full = not flat and shard is None
                holding = self._span(index, OPTIMIZER, storage, parts, in_full=in_full)
                yield replace(holding, as_counted=not flat)

    def _extents(
        self, index: int, key: str | None, numbers: set[int] | None = None
    ) -> list[Extent]:
        """Return the tensors' extents in the interval of bucket `index`.

        Args:
            key: Key of the optimizer state in the interval, or None for parameters.
            numbers: Indices of the parameters to include, or None for all.
        """
        interval = self._optimizer.intervals[index]
        names = {
            slot.parameter: self._name(slot.parameter, key)
            for slot in interval.bucket.slots
            if numbers is None or slot.parameter in numbers
        }
        return extents(interval.bucket.pieces(*interval.own), interval.own[0], names, self._shards)

    def _name(self, number: int, key: str | None) -> str:
        name = self._parameters.named[number].name
        return name if key is None else state_name(name, key)

    def _span(
        self,
        index: int,
        kind: str,
        storage: Storage,
        parts: Sequence[Extent],
        *,
        in_full: bool = False,
    ) -> StoredTensors:
        bucket = self._optimizer.intervals[index].bucket
        among = self._among_own if kind == OPTIMIZER else self._among
        # Either all tensors of a bucket are split or none, so check the first. Even full tensors of
        # an expert are only on the ranks that have the expert.
        is_split = bucket.slots[0].parameter in self._shards
        is_split &= bucket.axis == EXPERT_COPIES or not in_full
        copy, copies = among[bucket.axis if is_split else None]
        return StoredTensors(kind, storage, parts, copy, copies)

    # -- tensors whose memory order differs from their element order ------------------------

    def out_of_order(self, reported: ReportedState) -> set[tuple[str, str]]:
        """Return (kind, name) of each tensor whose memory order differs from its element order."""
        return {
            (kind, self._name(slot.parameter, key))
            for index in range(len(self._optimizer.intervals))
            if (slots := self._reordered_slots(index))
            for kind, key, _ in self._flat_states(index, slots, reported)
            for slot in slots
            if self._has(slot.parameter, key, reported)
        }

    def reordered(self, reported: ReportedState) -> Iterator[tuple[str, str, Tensor]]:
        """Yield (kind, name, value) for each tensor in `out_of_order`.

        The values are full tensors, flattened in element order, on every rank. Collective: gathers
        one bucket at a time.
        """
        for index in range(len(self._optimizer.intervals)):
            if not (slots := self._reordered_slots(index)):
                continue
            for kind, key, dtype in self._flat_states(index, slots, reported):
                flat = self._gather_state(index, kind, key, dtype)
                for slot in slots:
                    if self._has(slot.parameter, key, reported):
                        view = self._parameters.named[slot.parameter].view(flat, slot.start)
                        yield kind, self._name(slot.parameter, key), view.contiguous().view(-1)

    def _reordered_slots(self, index: int) -> list[Slot]:
        return [
            slot
            for slot in self._optimizer.intervals[index].bucket.slots
            if not self._parameters.named[slot.parameter].in_order
        ]

    def _has(self, number: int, key: str | None, reported: ReportedState) -> bool:
        return key in (None, MASTER) or key in reported.states.get(number, ())

    def _flat_states(
        self, index: int, slots: Sequence[Slot], reported: ReportedState
    ) -> Iterator[tuple[str, str | None, torch.dtype]]:
        """Yield (kind, key, dtype) of each state with one value per element of bucket `index`.

        The order is the same on all ranks.
        """
        for kind, key, storage in self._intervals(index):
            yield kind, key, storage.dtype
        # Use the keys reported by all ranks. A key may belong only to other ranks' parameters, but
        # every rank must take part in the gather.
        dtypes = {
            key: entry.dtype
            for slot in slots
            for key, entry in reported.states.get(slot.parameter, {}).items()
            if isinstance(entry, Blank) and not self._optimizer.groups[index].whole
        }
        for key in sorted(dtypes):
            yield OPTIMIZER, key, dtypes[key]

    def _gather_state(self, index: int, kind: str, key: str | None, dtype: torch.dtype) -> Tensor:
        """Return one state for the full bucket `index`. Collective if the state is sharded."""
        interval = self._optimizer.intervals[index]
        own = {(k, name): storage for k, name, storage in self._intervals(index)}
        device = self._parameters.kind(index)[1]
        if (kind, key) in own:
            value = own[kind, key].loaded(device)
        else:
            assert key is not None
            value = self._optimizer.whole(index, key, dtype).to(device)
        group = self._group if self._scattered else None
        return gather_bucket(interval.bucket, interval.own, value, group)


def of_sharded_bucket(bucket: ShardedBucket, among: Places) -> StoredTensors:
    """Return this rank's span of a sharded bucket of frozen parameters."""
    slots = list(zip(bucket.layout.slots, bucket.named, strict=True))
    names = {slot.parameter: named.name for slot, named in slots}
    shards = {slot.parameter: t.shard for slot, t in slots if t.shard is not None}
    parts = extents(bucket.layout.pieces(*bucket.own), bucket.own[0], names, shards)
    return StoredTensors(
        MODEL, bucket.storage, parts, *among[bucket.layout.axis if shards else None]
    )


def of_tensor(
    name: str,
    value: Tensor,
    copy: int,
    copies: int,
    kind: str = MODEL,
    shard: Shard | None = None,
) -> StoredTensors:
    """Return the span of the tensor `value`, which `copies` ranks hold.

    Args:
        copy: Index of this rank among those ranks.
        shard: Which part of the full tensor `value` is, or None if it is the full tensor.
    """
    whole = Extent(name, 0, value.numel(), 0)
    parts = [whole] if shard is None else of_whole(whole, shard)
    return StoredTensors(kind, MemoryStorage(_flat(value)), parts, copy, copies)


def reordered_bucket(
    bucket: ShardedBucket, group: Collectives
) -> Iterator[tuple[NamedParameter, Tensor]]:
    """Yield the full tensors of `bucket` whose memory order differs from their element order.

    The values are flattened in element order. Collective.
    """
    if all(named.in_order for named in bucket.named):
        return
    value = bucket.storage.loaded(bucket.kind[2])
    flat = gather_bucket(bucket.layout, bucket.own, value, group)
    for named, slot in zip(bucket.named, bucket.layout.slots, strict=True):
        if not named.in_order:
            yield named, named.view(flat, slot.start).contiguous().view(-1)


def _flat(value: Tensor) -> Tensor:
    return value.detach().contiguous().view(-1)
