"""Maps intervals of buckets to named tensors, so that checkpoints can read and write them.

The states store intervals of flat buckets. A checkpoint stores tensors by name, and
each rank holds some of their elements. A StoredTensors connects the two.
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
from shardwise.states.optimizer.update_interval import UpdatedTensor
from shardwise.states.parameters.named_parameters import NamedParameter
from shardwise.states.parameters.parameters import Parameters
from shardwise.states.parameters.sharded_bucket import ShardedBucket
from shardwise.states.storage.storage import MemoryStorage, Storage

MODEL, OPTIMIZER, AVERAGE = "model", "optimizer", "average"
"""Kinds of sets that any checkpoint may have."""

OUTER, GROUP = "outer", "group"
"""Kinds of extra sets: one that all groups of ranks share, and one per group."""

ATTRIBUTES = "attributes"
"""Kind of the tensors in optimizers' attributes."""

MASTER = "master"
"""Key of fp32 masters among the optimizer's tensors."""


@dataclass(frozen=True)
class StoredTensors:
    """A flat interval with tensors of one set. `copies` ranks hold it; this rank is number `copy`.

    Elements outside all extents are padding. With `as_counted`, elements are in the order of their
    own tensor, even if their parameter is stored in another order.
    """

    kind: str
    storage: Storage
    extents: Sequence[Extent]
    copy: int = 0
    copies: int = 1
    as_counted: bool = False


@dataclass(frozen=True)
class ReportedState:
    """Optimizer state of all ranks: the entries by parameter, with a Blank for each tensor, and
    the parameters at whose borders segments were cut."""

    states: dict[int, dict[str, Any]]
    borders: set[int]


def state_name(name: str, key: str) -> str:
    """Return the tensor name of entry `key` in the state of parameter `name`."""
    return f"{name}.{key}"


class TensorSpans:
    """Spans of one rank in trained parameters, masters, optimizer state and averages.

    Args:
        group: Ranks that shard the states, if `scattered`.
        among: This rank's position among the ranks with the same elements, and their number. The
            key says whether a rank has only a part of each tensor (tensor parallelism).
        among_own: The same for optimizer state, which each group of ranks has for itself.
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
        """Gather the optimizer state's entries from all ranks. Collective."""
        own_report = self._own_states(), self._own_borders()
        # With replicated state each rank has all entries, so no collective is needed.
        gathered = self._group.gather_objects(own_report) if self._scattered else [own_report]
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
        shape = self._parameters.named[number].whole_shape if flat else value.shape
        return Blank(tuple(shape), value.dtype)

    def _own_borders(self) -> set[int]:
        # A cut at an interval's start follows from the bucket layout, so it need not be saved.
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
        """Yield all spans, bucket by bucket."""
        for index in range(len(self._optimizer.intervals)):
            for kind, key, storage in self._intervals(index):
                yield self._span(index, kind, storage, self._extents(index, key))
            yield from self._states(index)

    def _intervals(self, index: int) -> Iterator[tuple[str, str | None, Storage]]:
        """Yield set, key and storage of each state that covers a whole interval."""
        interval = self._optimizer.intervals[index]
        yield MODEL, None, interval.target
        # fp32 training has no separate master: target and master are the same storage.
        if interval.master is not interval.target:
            yield OPTIMIZER, MASTER, interval.master
        if self._averages is not None:
            yield AVERAGE, None, self._averages.storages[index]

    def _states(self, index: int) -> Iterator[StoredTensors]:
        interval = self._optimizer.intervals[index]
        # Moments cover the whole interval, but some parameters may have none yet.
        for key, storage in interval.moments.items():
            numbers = {
                piece.parameter
                for segment, state in self._optimizer.state_of(index)
                if key in state
                for piece in segment.pieces
            }
            yield self._span(index, OPTIMIZER, storage, self._extents(index, key, numbers))
        # All other tensors, such as Adafactor's factors, belong to one segment each.
        for segment, state in self._optimizer.state_of(index):
            for key, value in state.items():
                is_tensor = self._optimizer.is_tensor(index, segment, key, value)
                if key in interval.moments or not is_tensor:
                    continue
                names = {p.parameter: self._name(p.parameter, key) for p in segment.pieces}
                if flat := self._optimizer.is_flat(index, segment, key, value):
                    parts = extents(segment.pieces, segment.first, names, self._shards)
                else:
                    parts = [Extent(next(iter(names.values())), 0, value.numel(), 0)]
                holding = self._span(index, OPTIMIZER, MemoryStorage(_flat(value)), parts)
                yield replace(holding, as_counted=not flat)

    def _extents(
        self, index: int, key: str | None, numbers: set[int] | None = None
    ) -> list[Extent]:
        """Return the extents of a bucket's interval, named by `key`; only of `numbers` if given."""
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
        self, index: int, kind: str, storage: Storage, parts: Sequence[Extent]
    ) -> StoredTensors:
        # Tensors of a bucket are either all whole or all parts, so the first slot decides.
        slots = self._optimizer.intervals[index].bucket.slots
        among = self._among_own if kind == OPTIMIZER else self._among
        copy, copies = among[slots[0].parameter in self._shards]
        return StoredTensors(kind, storage, parts, copy, copies)

    # -- tensors whose memory order differs from their element order ------------------------

    def out_of_order(self, reported: ReportedState) -> set[tuple[str, str]]:
        """Return set and name of tensors whose memory order differs from their element order."""
        return {
            (kind, self._name(slot.parameter, key))
            for index in range(len(self._optimizer.intervals))
            if (slots := self._reordered_slots(index))
            for kind, key, _ in self._flat_states(index, slots, reported)
            for slot in slots
            if self._has(slot.parameter, key, reported)
        }

    def reordered(self, reported: ReportedState) -> Iterator[tuple[str, str, Tensor]]:
        """Yield these tensors flat in element order, whole on every rank.

        Collective, bucket by bucket.
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
        """Yield set, key and dtype of the states that are flat over a bucket, in the same order
        on all ranks."""
        for kind, key, storage in self._intervals(index):
            yield kind, key, storage.dtype
        # From the reported state, not from this rank's: another rank's parameters may have a key
        # that no parameter of this rank has, and the gather needs every rank.
        dtypes = {
            key: entry.dtype
            for slot in slots
            for key, entry in reported.states.get(slot.parameter, {}).items()
            if isinstance(entry, Blank) and not self._optimizer.groups[index].whole
        }
        for key in sorted(dtypes):
            yield OPTIMIZER, key, dtypes[key]

    def _gather_state(self, index: int, kind: str, key: str | None, dtype: torch.dtype) -> Tensor:
        """Gather one state of a whole bucket. Collective if the state is sharded."""
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


def of_sharded_bucket(
    bucket: ShardedBucket, among: Mapping[bool, tuple[int, int]]
) -> StoredTensors:
    """Return the span of a sharded bucket of frozen parameters; `among` is as in TensorSpans."""
    slots = list(zip(bucket.layout.slots, bucket.named, strict=True))
    names = {slot.parameter: named.name for slot, named in slots}
    shards = {slot.parameter: t.shard for slot, t in slots if t.shard is not None}
    parts = extents(bucket.layout.pieces(*bucket.own), bucket.own[0], names, shards)
    return StoredTensors(MODEL, bucket.storage, parts, *among[bool(shards)])


def of_tensor(
    name: str,
    value: Tensor,
    copy: int,
    copies: int,
    kind: str = MODEL,
    shard: Shard | None = None,
) -> StoredTensors:
    """Return the span of a whole tensor that `copies` ranks hold, or of its part `shard`."""
    whole = Extent(name, 0, value.numel(), 0)
    parts = [whole] if shard is None else of_whole(whole, shard)
    return StoredTensors(kind, MemoryStorage(_flat(value)), parts, copy, copies)


def reordered_bucket(
    bucket: ShardedBucket, group: Collectives
) -> Iterator[tuple[NamedParameter, Tensor]]:
    """Yield the tensors of `bucket` whose memory order differs from their element order, in
    element order. Collective."""
    if all(named.in_order for named in bucket.named):
        return
    value = bucket.storage.loaded(bucket.kind[2])
    flat = gather_bucket(bucket.layout, bucket.own, value, group)
    for named, slot in zip(bucket.named, bucket.layout.slots, strict=True):
        if not named.in_order:
            yield named, named.view(flat, slot.start).contiguous().view(-1)


def _flat(value: Tensor) -> Tensor:
    return value.detach().contiguous().view(-1)
