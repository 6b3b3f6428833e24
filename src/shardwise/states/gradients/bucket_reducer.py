"""Reduces buckets of gradients over the ranks: from a rank's flat buffer to the sum of all.

    fill ─▶ launch ─▶ all-reduce or reduce-scatter, beside backward ─▶ settle ─▶ accumulator
    borrow ◀────────────────── give_back, once nobody reads the buffer ◀┘

A buffer that is not a bucket's own for good is borrowed from a pool, and goes back when its sum
has been added to the bucket's accumulator.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType

import torch
from torch import Tensor

from shardwise.comm import Collectives, Handle, Sum
from shardwise.layout.bucket_layout import Bucket
from shardwise.layout.placement import Placement
from shardwise.model.precision import NARROW
from shardwise.states.gradients.gradient_accumulator import (
    GradientAccumulator,
    GradientBucket,
    Summation,
)
from shardwise.states.parameters.named_parameters import NamedParameter
from shardwise.states.parameters.parameters import Parameters
from shardwise.states.storage.storage import MemoryStorage, Span
from shardwise.states.storage.storage_factory import StorageFactory, TensorKind
from shardwise.timeline import recorder

IN_FLIGHT = 2
"""Borrowed buffers that may be in a collective at once; the oldest is waited for beyond that."""

SENT_APART = 1 << 19
"""Elements from which a gradient is worth messages of its own, where those save a copy."""

LAG = 1
"""How many buckets later what has come in is summed (and an all-reduce's second half starts): by
then it has most likely come from all ranks, so that nobody waits."""

_NOWHERE: Mapping[int, Tensor] = MappingProxyType({})


@dataclass(frozen=True, eq=False)
class _InFlight:
    """A buffer in a collective; `in_place` when its sum goes to the accumulator without a copy."""

    bucket: GradientBucket
    buffer: Tensor
    handle: Handle
    in_place: bool


@dataclass(frozen=True, eq=False)
class _SpareBuffer:
    """A buffer that nobody has borrowed; it may still be read for `last`."""

    buffer: Tensor
    last: Sequence[Handle] = ()

    def reusable(self) -> None:
        """Return when it may be written."""
        for handle in self.last:
            handle.reusable()


class BucketReducer:
    """Runs the collectives of a step's gradients: all-reduce, or reduce-scatter where the optimizer
    state is sharded. Every rank launches the same buckets in the same order."""

    def __init__(
        self,
        parameters: Parameters,
        placement: Placement,
        group: Collectives,
        factory: StorageFactory,
        summation: Summation,
        *,
        exact_sum: bool,
    ) -> None:
        self._group = group
        self._exact_sum = exact_sum
        self._summation = summation
        self._scatter = placement.is_sharded("optimizer")
        self._in_flight: deque[_InFlight] = deque()
        self._parameters = parameters
        self.patient = True
        """Whether this rank may wait for a sum while its backward runs. Not where backward waits
        for other ranks elsewhere too (BatchNorm over all ranks, but in a turn): one that has not
        used the same parameters would wait there, for a rank that waits here for a bucket of its
        own."""
        self._pool: dict[tuple[torch.dtype, torch.device], deque[_SpareBuffer]] = {}
        # By the address of a buffer, and the bucket in it; as long as the buffer is ours.
        self._views: dict[int, dict[tuple[int, bool], BucketViews]] = {}
        self._out = self._most_out = 0
        borrowed = summation.in_tree or placement.is_sharded("gradients")
        self.buckets = self._make_buckets(parameters, factory, borrowed=borrowed)
        self.sent_apart = [self._sent_apart(bucket) for bucket in parameters.buckets]
        """By bucket, the slots whose gradients need not be in its buffer to be sent."""

    def _make_buckets(
        self, parameters: Parameters, factory: StorageFactory, *, borrowed: bool
    ) -> list[GradientBucket]:
        """Room for every bucket's gradient, whole unless it is `borrowed` for each backward."""
        layouts, rank = parameters.buckets, self._group.rank
        kinds = [parameters.kind(index) for index in range(len(layouts))]
        owns = [b.interval(rank) if self._scatter else (0, b.numel) for b in layouts]
        if borrowed:
            wide = [(torch.float32 if d in NARROW else d, where) for d, where in kinds]
            if self._summation.in_tree and self._exact_sum:
                kinds = wide  # rounded to 16 bits in between, sums would depend on where that is
            # On a disk 16-bit sums are kept as wide as they will be needed; those of the tree are
            # rounded alike wherever they are made.
            widened = factory.on_disk and not self._summation.in_tree
            accumulators = self._accumulators(owns, factory, wide if widened else kinds)
            places = zip(layouts, owns, [None] * len(layouts), accumulators, kinds, strict=True)
            return [GradientBucket(index, *place) for index, place in enumerate(places)]
        buckets = []
        for index, (layout, own, kind) in enumerate(zip(layouts, owns, kinds, strict=True)):
            kept = self._group.allocate(layout.numel, *kind)
            accumulator = GradientAccumulator([MemoryStorage(kept[slice(*own)])], (), kind[1])
            buckets.append(GradientBucket(index, layout, own, kept, accumulator, kind))
        return buckets

    def _accumulators(
        self, owns: Sequence[Span], factory: StorageFactory, kinds: Sequence[TensorKind]
    ) -> list[GradientAccumulator]:
        """Room for the elements `owns` of every bucket, level by level of the tree."""
        fan_ins = self._summation.fan_ins
        depth = max(len(fan_ins), 1)
        lengths = [end - first for first, end in owns for _ in range(depth)]
        each = [kind for kind in kinds for _ in range(depth)]
        levels = iter(factory.make("gradients", lengths, each, width=min(depth, 2)))
        return [
            GradientAccumulator([next(levels) for _ in range(depth)], fan_ins, kind[1])
            for kind in kinds
        ]

    def _sent_apart(self, bucket: Bucket) -> list[int]:
        slots = bucket.slots if self._group.sends_pieces else ()
        return [place for place, slot in enumerate(slots) if slot.numel >= SENT_APART]

    def launch(
        self,
        bucket: GradientBucket,
        buffer: Tensor,
        elsewhere: Mapping[int, Tensor] = _NOWHERE,
        onto: Tensor | None = None,
    ) -> None:
        """Start to reduce `buffer`, a bucket's gradients of this rank; those of the slots
        `elsewhere` are there, flat, and those of its own interval in what `onto` gave, if that is
        given: not in the buffer."""
        into = bucket.in_place
        how = Sum(self._exact_sum, self._summation.in_tree)
        what = "reduce-scatter" if self._scatter else "all-reduce"
        launched = recorder.launched(what, buffer, bucket.index)
        cuts, group = bucket.layout.cuts, self._group
        if onto is not None:
            handle = group.reduce_scatter_onto(onto, buffer, cuts, how)
        elif self._scatter:
            pieces = self._pieces(bucket, buffer, elsewhere)
            handle = group.reduce_scatter_pieces(pieces, buffer, cuts, how, into=into)
        else:
            pieces = self._pieces(bucket, buffer, elsewhere)
            handle = group.all_reduce_pieces(pieces, buffer, how)
        handle.noted(launched)
        bucket.awaited = True
        if buffer is bucket.kept:
            bucket.sent = handle
        in_place = buffer is bucket.kept or (into is not None and self._scatter)
        self._in_flight.append(_InFlight(bucket, buffer, handle, in_place))
        # The sum of the bucket before is made only now: asked for at once, ranks would wait.
        if len(self._in_flight) > LAG and (self.patient or self._group.looks):
            self._in_flight[-1 - LAG].handle.advance()

    def _pieces(
        self, bucket: GradientBucket, buffer: Tensor, elsewhere: Mapping[int, Tensor]
    ) -> list[Tensor]:
        """What the buffer would hold, cut on all ranks where a gradient may be elsewhere."""
        pieces, end = [], 0
        for place in self.sent_apart[bucket.index]:
            slot = bucket.layout.slots[place]
            if end < slot.start:
                pieces.append(buffer[end : slot.start])
            pieces.append(elsewhere.get(place, buffer[slot.start : slot.end]))
            end = slot.end
        return pieces if pieces and end == bucket.layout.numel else [*pieces, buffer[end:]]

    def drain(self) -> Iterator[GradientBucket]:
        """Wait for everything that was launched; yields each bucket when its sum has come."""
        # All are advanced before one is waited for: another rank may wait for a later one.
        for sent in self._in_flight:
            sent.handle.advance()
        while self._in_flight:
            yield self._settle_oldest()

    def _settle_oldest(self) -> GradientBucket:
        sent = self._in_flight.popleft()
        sent.handle.wait()
        bucket, buffer = sent.bucket, sent.buffer
        read: list[Handle] = []
        if sent.in_place:
            bucket.accumulator.count_part()
        else:
            bucket.sent.reusable()  # another rank may still copy the first sum out of `kept`
            read = [bucket.accumulate(buffer[bucket.own[0] : bucket.own[1]])]
        if buffer is not bucket.kept:
            self.give_back(buffer, sent.handle, *read)
        return bucket

    def widen(self) -> None:
        """Let 16-bit gradients rest in fp32 from the next step on, all ranks alike.

        Done once steps turn out to have several micro-batches: their sum would soon be too large
        for 16 bits to add another one to.
        """
        narrow = [bucket for bucket in self.buckets if bucket.reduced.dtype in NARROW]
        for bucket in narrow:
            if bucket.kept is None:
                bucket.accumulator.widen()
            else:
                bucket.kept = bucket.kept.float()
                mine = MemoryStorage(bucket.kept[bucket.own[0] : bucket.own[1]])
                bucket.accumulator = GradientAccumulator([mine], (), bucket.kind[1])
        if narrow:
            self._views.clear()  # they are of the kept buffers from before

    def clear(self) -> None:
        """Forget the sums of this step, once no other rank reads a kept buffer any more.

        After a step's exchange that is known without waiting: no rank comes to it before it has
        read all that it needs, and messages of one rank keep their order. A step that was
        abandoned has no exchange, and waits here.
        """
        self._trim()
        for bucket in self.buckets:
            bucket.sent.reusable()  # else a backward would write what another rank still sums
            bucket.clear()

    def _trim(self) -> None:
        """Keep as many buffers as this step had out at once: the first needs more than others."""
        for spares in self._pool.values():
            while len(spares) > max(self._most_out, IN_FLIGHT):
                spare = spares.popleft()
                spare.reusable()
                # Its address may be another buffer's next.
                self._views.pop(spare.buffer.data_ptr(), None)
        self._most_out = self._out

    def onto(self, bucket: GradientBucket) -> Tensor | None:
        """Where this rank's own interval of a bucket's gradients can be collected apart from the
        buffer, since the sum is made there; None where it must be in the buffer."""
        place = bucket.in_place
        if place is None or not (self._scatter and self._group.sums_onto):
            return None
        return place if (place.dtype, place.device) == bucket.kind else None

    def views(
        self, bucket: GradientBucket, buffer: Tensor, onto: Tensor | None = None
    ) -> BucketViews:
        """The bucket's place in `buffer`, a kept or a borrowed one, its own interval in `onto` if
        that is given."""
        views = self._views.setdefault(buffer.data_ptr(), {})
        key = bucket.index, onto is not None
        if key not in views:
            named = [self._parameters.named[slot.parameter] for slot in bucket.layout.slots]
            views[key] = BucketViews(bucket.layout, named, buffer, bucket.own, onto)
        return views[key]

    def borrow(self, bucket: GradientBucket) -> Tensor:
        """A buffer of the bucket's length, with anything in it."""
        while sum(f.buffer is not f.bucket.kept for f in self._in_flight) >= IN_FLIGHT:
            if not (self.patient or self._in_flight[0].handle.is_there()):
                break  # another buffer instead
            self._settle_oldest()
        spares = self._pool.setdefault(bucket.kind, deque())
        if not spares:
            longest = max(each.layout.numel for each in self.buckets if each.kind == bucket.kind)
            spares.append(_SpareBuffer(self._group.allocate(longest, *bucket.kind)))
        self._out += 1
        self._most_out = max(self._out, self._most_out)
        # First in, first out: what was given back last is read by others for longest.
        spare = spares.popleft()
        spare.reusable()
        return spare.buffer[: bucket.layout.numel]

    def give_back(self, buffer: Tensor, *last: Handle) -> None:
        """Return what `borrow` gave; `last` are the collective and the copy that it was in."""
        self._out -= 1
        whole = buffer if buffer._base is None else buffer._base
        kind = (buffer.dtype, buffer.device)
        self._pool[kind].append(_SpareBuffer(whole, last))

    @property
    def state_bytes(self) -> int:
        """Bytes of gradient that this rank keeps between steps."""
        return sum(bucket.nbytes for bucket in self.buckets)


class BucketViews:
    """Views of a bucket's flat memory, one for each gradient, in the form of its parameter.

    The memory is `buffer`, but for the elements `apart`, which are in `own`. A slot that a border
    of `apart` goes through is several views, flat. `named` are the parameters of the slots.
    """

    def __init__(
        self,
        layout: Bucket,
        named: Sequence[NamedParameter],
        buffer: Tensor,
        apart: tuple[int, int] = (0, 0),
        own: Tensor | None = None,
    ) -> None:
        self._named = named
        self.targets: list[list[Tensor]] = []
        """By slot, the memory that takes its gradient."""
        self.gaps: list[Tensor] = []
        """What lies between slots."""

        def memory(start: int, end: int) -> list[Tensor]:
            """That of the elements [start, end), in order."""
            if own is None:
                return [buffer[start:end]]
            first, last = apart
            borders = sorted({border for border in apart if start < border < end})
            return [
                own[a - first : b - first] if first <= a < last else buffer[a:b]
                for a, b in pairwise([start, *borders, end])
            ]

        end = 0
        for slot, each in zip(layout.slots, named, strict=True):
            if end < slot.start:
                self.gaps += memory(end, slot.start)
            parts = memory(slot.start, slot.end)
            self.targets.append(parts if len(parts) > 1 else [each.view(p, 0) for p in parts])
            end = slot.end
        if end < layout.numel:
            self.gaps += memory(end, layout.numel)

    def parts(self, place: int, value: Tensor) -> Sequence[Tensor]:
        """`value`, of the form of a slot's parameter, as its `targets` take it."""
        targets = self.targets[place]
        if len(targets) == 1:
            return [value]
        flat = self._named[place].flat(value)
        if flat is None:
            flat = self._named[place].flattened(value)
        return torch.split(flat, [target.numel() for target in targets])
