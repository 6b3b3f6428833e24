"""Maps intervals of buckets to named tensors, so that checkpoints read and write them by spans.

A state knows intervals of buckets. To the world outside it is tensors with names, of which each
rank has some elements: a checkpoint is written from, and read into, these spans.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from shardwise.comm import Collectives
from shardwise.layout.bucket_layout import Slot
from shardwise.layout.byte_ranges import Extent, extents, of_whole
from shardwise.layout.shards import Shard
from shardwise.states.optimizer.ema import Averages
from shardwise.states.optimizer.existing_optimizer_state import Blank
from shardwise.states.optimizer.interval_gather import gather_bucket, on_host
from shardwise.states.optimizer.optimizer_state import OptimizerState
from shardwise.states.parameters.named_parameters import NamedParameter
from shardwise.states.parameters.parameters import Parameters
from shardwise.states.parameters.sharded_bucket import ShardedBucket
from shardwise.states.parameters.update_intervals import UpdateSegment
from shardwise.states.storage.storage import MemoryStorage, Storage

MODEL, OPTIMIZER, AVERAGE = "model", "optimizer", "average"
"""The sets of tensors that there are."""

OUTER, ISLAND = "outer", "island"
"""Those that islands have more: alike on all, and of each."""

ATTRIBUTES = "attributes"
"""The set of tensors that optimizers keep in attributes."""

MASTER = "master"
"""The key under which masters stand among the optimizer's tensors."""


@dataclass(frozen=True)
class TensorSpan:
    """A flat interval of a set's tensors: its storage, what lies in it, and how many ranks have it.

    Of `copies` ranks with the same, this is number `copy`. What lies in no extent is padding.
    `as_counted`: elements lie in the order of the tensor's own, whatever its parameter's is.
    """

    kind: str
    storage: Storage
    extents: Sequence[Extent]
    copy: int = 0
    copies: int = 1
    as_counted: bool = False


@dataclass(frozen=True)
class ReportedState:
    """The optimizer state that all ranks reported: by parameter its entries, tensors as Blanks, and
    the parameters at which segments were cut."""

    states: dict[int, dict[str, Any]]
    borders: set[int]


def state_name(name: str, key: str) -> str:
    """What entry `key` of parameter `name` is called among the optimizer's tensors."""
    return f"{name}.{key}"


class TensorSpans:
    """The spans of one rank in the trained parameters, their masters, state and averages.

    `group` shards them where `scattered`. `among`: this rank's number, and of how many that have
    the same, of what is whole here and (True) of what is a part; `among_own` that of optimizer
    state, which each island has for itself.
    """

    def __init__(
        self,
        parameters: Parameters,
        optimizer: OptimizerState,
        averages: Averages | None,
        group: Collectives,
        *,
        scattered: bool,
        among: Mapping[bool, tuple[int, int]],
        among_own: Mapping[bool, tuple[int, int]],
    ) -> None:
        self._parameters = parameters
        self._optimizer = optimizer
        self._averages = averages
        self._group = group
        self._scattered = scattered
        self._among = among
        self._among_own = among_own
        self._shards = {
            number: named.shard
            for number, named in enumerate(parameters.named)
            if named.shard is not None
        }

    def reported(self) -> ReportedState:
        """Report which state there is, to all ranks. Collective."""
        mine = self._own_states(), self._own_borders()
        gathered = self._group.gather_objects(mine) if self._scattered else [mine]
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

    def _entry(self, index: int, segment: UpdateSegment, number: int, key: str, value: Any) -> Any:
        if not self._optimizer.is_tensor(index, segment, key, value):
            return value
        flat = self._optimizer.is_flat(index, segment, key, value)
        shape = self._parameters.named[number].whole_shape if flat else value.shape
        return Blank(tuple(shape), value.dtype)

    def _own_borders(self) -> set[int]:
        return {
            segment.pieces[0].parameter
            for interval, group in zip(
                self._optimizer.intervals, self._optimizer.groups, strict=True
            )
            if not group.whole
            for segment in interval.segments
            if segment.first > interval.own[0] and segment.pieces[0].offset == 0
        }

    def __iter__(self) -> Iterator[TensorSpan]:
        """All of it, bucket by bucket, in intervals as they lie."""
        for index in range(len(self._optimizer.intervals)):
            for kind, key, storage in self._intervals(index):
                yield self._holding(index, kind, storage, self._extents(index, key))
            yield from self._states(index)

    def _intervals(self, index: int) -> Iterator[tuple[str, str | None, Storage]]:
        """What covers the whole interval of a bucket: set, key and memory."""
        interval = self._optimizer.intervals[index]
        yield MODEL, None, interval.target
        if interval.master is not interval.target:
            yield OPTIMIZER, MASTER, interval.master
        if self._averages is not None:
            yield AVERAGE, None, self._averages.storages[index]

    def _states(self, index: int) -> Iterator[TensorSpan]:
        interval = self._optimizer.intervals[index]
        for key, storage in interval.moments.items():
            numbers = {
                piece.parameter
                for segment, state in self._optimizer.state_of(index)
                if key in state
                for piece in segment.pieces
            }
            yield self._holding(index, OPTIMIZER, storage, self._extents(index, key, numbers))
        for segment, state in self._optimizer.state_of(index):
            for key, value in state.items():
                is_tensor = self._optimizer.is_tensor(index, segment, key, value)
                if key in interval.moments or not is_tensor:
                    continue
                names = {p.parameter: self._name(p.parameter, key) for p in segment.pieces}
                if flat := self._optimizer.is_flat(index, segment, key, value):
                    found = extents(segment.pieces, segment.first, names, self._shards)
                else:
                    found = [Extent(next(iter(names.values())), 0, value.numel(), 0)]
                holding = self._holding(index, OPTIMIZER, MemoryStorage(_flat(value)), found)
                yield replace(holding, as_counted=not flat)

    def _extents(
        self, index: int, key: str | None, numbers: set[int] | None = None
    ) -> list[Extent]:
        """The extents of a bucket's interval by the names of a key; of `numbers` if given."""
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

    def _holding(
        self, index: int, kind: str, storage: Storage, found: Sequence[Extent]
    ) -> TensorSpan:
        # A bucket holds parts of tensors only, or none.
        slots = self._optimizer.intervals[index].bucket.slots
        among = self._among_own if kind == OPTIMIZER else self._among
        copy, copies = among[slots[0].parameter in self._shards]
        return TensorSpan(kind, storage, found, copy, copies)

    # -- tensors whose memory is not in the order of their elements -------------------------

    def out_of_order(self, reported: ReportedState) -> set[tuple[str, str]]:
        """Set and name of the tensors that lie in memory in another order than their elements'."""
        return {
            (kind, self._name(slot.parameter, key))
            for index in range(len(self._optimizer.intervals))
            if (slots := self._odd_slots(index))
            for kind, key, _ in self._wholes(index, slots, reported)
            for slot in slots
            if self._has(slot.parameter, key, reported)
        }

    def reordered(self, reported: ReportedState) -> Iterator[tuple[str, str, Tensor]]:
        """The same tensors, flat in the order of their elements, whole on every rank. Collective,
        bucket by bucket."""
        for index in range(len(self._optimizer.intervals)):
            if not (slots := self._odd_slots(index)):
                continue
            for kind, key, dtype in self._wholes(index, slots, reported):
                flat = self._whole(index, kind, key, dtype)
                for slot in slots:
                    if self._has(slot.parameter, key, reported):
                        view = self._parameters.named[slot.parameter].view(flat, slot.start)
                        yield kind, self._name(slot.parameter, key), view.contiguous().view(-1)

    def _odd_slots(self, index: int) -> list[Slot]:
        return [
            slot
            for slot in self._optimizer.intervals[index].bucket.slots
            if not self._parameters.named[slot.parameter].in_order
        ]

    def _has(self, number: int, key: str | None, reported: ReportedState) -> bool:
        return key in (None, MASTER) or key in reported.states.get(number, ())

    def _wholes(
        self, index: int, slots: Sequence[Slot], reported: ReportedState
    ) -> Iterator[tuple[str, str | None, torch.dtype]]:
        """Set, key and dtype of what is flat over a bucket, alike on all ranks."""
        for kind, key, storage in self._intervals(index):
            yield kind, key, storage.dtype
        dtypes = {
            key: entry.dtype
            for slot in slots
            for key, entry in reported.states.get(slot.parameter, {}).items()
            if isinstance(entry, Blank) and not self._optimizer.groups[index].whole
        }
        for key in sorted(dtypes):
            yield OPTIMIZER, key, dtypes[key]

    def _whole(self, index: int, kind: str, key: str | None, dtype: torch.dtype) -> Tensor:
        """A bucket of one state, put together."""
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


def of_sharded_bucket(bucket: ShardedBucket, among: Mapping[bool, tuple[int, int]]) -> TensorSpan:
    """A bucket of frozen parameters that is sharded; `among` is as in Holdings."""
    slots = list(zip(bucket.layout.slots, bucket.named, strict=True))
    names = {slot.parameter: named.name for slot, named in slots}
    shards = {slot.parameter: t.shard for slot, t in slots if t.shard is not None}
    found = extents(bucket.layout.pieces(*bucket.own), bucket.own[0], names, shards)
    return TensorSpan(MODEL, bucket.storage, found, *among[bool(shards)])


def of_tensor(
    name: str,
    value: Tensor,
    copy: int,
    copies: int,
    kind: str = MODEL,
    shard: Shard | None = None,
) -> TensorSpan:
    """A whole tensor that `copies` ranks hold, or the part of it that `shard` names, in the order
    of its elements."""
    whole = Extent(name, 0, value.numel(), 0)
    found = [whole] if shard is None else of_whole(whole, shard)
    return TensorSpan(kind, MemoryStorage(_flat(value)), found, copy, copies)


def reordered_bucket(
    bucket: ShardedBucket, group: Collectives
) -> Iterator[tuple[NamedParameter, Tensor]]:
    """The tensors of `bucket` that lie in memory in another order than that of their elements."""
    if all(named.in_order for named in bucket.named):
        return
    value = bucket.storage.loaded(bucket.kind[2])
    flat = gather_bucket(bucket.layout, bucket.own, value, group)
    for named, slot in zip(bucket.named, bucket.layout.slots, strict=True):
        if not named.in_order:
            yield named, named.view(flat, slot.start).contiguous().view(-1)


def _flat(value: Tensor) -> Tensor:
    return value.detach().contiguous().view(-1)
