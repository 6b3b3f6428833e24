"""Gradients on the way: from a rank's flat buffer to the sum over all ranks.

A buffer that is not a bucket's own for good is borrowed from a pool, and goes back when its sum
has been added to where the bucket's sums rest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import Tensor

from shardwise.collectives import Collectives, Handle, Sum
from shardwise.layout import Bucket
from shardwise.model.precision import NARROW
from shardwise.placement import Placement
from shardwise.states.accumulator import Summation
from shardwise.states.bucket_views import Landing
from shardwise.states.parameters import Parameters
from shardwise.states.squares import Squares
from shardwise.states.storage import Held, InMemory, Span
from shardwise.states.storage_factory import Kind, Shelf
from shardwise.states.sum_parts import Tally
from shardwise.timeline import recorder

IN_FLIGHT = 2
"""Borrowed buffers that may be on their way at once; the oldest is waited for beyond that."""

STRAIGHT = 1 << 19
"""Elements from which a gradient is worth messages of its own, where those save a copy."""

LAG = 1
"""How many buckets later what has come in is summed (and an all-reduce's second half starts): by
then it has most likely come from all ranks, so that nobody waits."""


_NOWHERE: Mapping[int, Tensor] = MappingProxyType({})


@dataclass(eq=False)
class Rest:
    """Where a bucket's gradient rests on this rank.

    `own` are the elements whose sum this rank needs: its interval, or all of them. `kept` is the
    whole buffer where micro-batches add up before they are reduced. `tally` has the elements
    `own`, of which a sum of this step is `awaited` once launched; `squares` may know its norm, as
    `told` does where the sum is not where it was made.
    """

    index: int
    bucket: Bucket
    own: tuple[int, int]
    kept: Tensor | None
    tally: Tally
    kind: tuple[torch.dtype, torch.device]
    """Of the buffers that gradients are collected in."""
    awaited: bool = False
    squares: Squares = field(default_factory=Squares)
    told: Tensor | None = None
    sent: Handle = field(default_factory=Handle)
    """The collective that `kept` went into: others may read it until that is reusable."""

    @property
    def nbytes(self) -> int:
        """Bytes that this rank keeps between steps."""
        return self.tally.nbytes if self.kept is None else self.kept.nbytes

    @property
    def reduced(self) -> Held:
        """The reduced gradient of the elements `own`."""
        return self.tally.total

    @property
    def in_place(self) -> Tensor | None:
        """Memory that the next sum can come to without a copy: the first of a step."""
        held = self.tally.levels[0]
        free = self.kept is None and not self.awaited
        return held.tensor if free and isinstance(held, InMemory) else None

    def take_in(self, part: Tensor) -> Handle:
        """Add `part`, a sum over the ranks, to this step's.

        `part` may be written again when the handle is `reusable`.
        """
        self.told, read = self.tally.take(part)
        return read

    def clear(self) -> None:
        """Forget the sum of this step."""
        self.awaited = False
        self.tally.clear()
        self.squares.clear()
        self.told = None


@dataclass(frozen=True, eq=False)
class _Flying:
    """A buffer on its way; `arrived` when its sum goes to where it rests without a copy."""

    rest: Rest
    buffer: Tensor
    handle: Handle
    arrived: bool


@dataclass(frozen=True, eq=False)
class _Spare:
    """A buffer that nobody has borrowed; it may still be read for `last`."""

    buffer: Tensor
    last: Sequence[Handle] = ()

    def reusable(self) -> None:
        """Return when it may be written."""
        for handle in self.last:
            handle.reusable()


class Reduction:
    """The collectives of a step's gradients: all-reduce, or reduce-scatter where the optimizer
    state is sharded. Every rank launches the same buckets in the same order."""

    def __init__(
        self,
        parameters: Parameters,
        placement: Placement,
        group: Collectives,
        shelf: Shelf,
        summation: Summation,
        *,
        exact_sum: bool,
    ) -> None:
        self._group = group
        self._exact_sum = exact_sum
        self._summation = summation
        self._scatter = placement.is_sharded("optimizer")
        self._flight: deque[_Flying] = deque()
        self._parameters = parameters
        self.patient = True
        """Whether this rank may wait for a sum while its backward runs. Not where backward waits
        for other ranks elsewhere too (BatchNorm over all ranks, but in a turn): one that has not
        used the same parameters would wait there, for a rank that waits here for a bucket of its
        own."""
        self._pool: dict[tuple[torch.dtype, torch.device], deque[_Spare]] = {}
        # By the address of a buffer, and the bucket in it; as long as the buffer is ours.
        self._landings: dict[int, dict[tuple[int, bool], Landing]] = {}
        self._out = self._most_out = 0
        borrowed = summation.in_tree or placement.is_sharded("gradients")
        self.rests = self._rests(parameters, shelf, borrowed=borrowed)
        self.straight = [self._straight(bucket) for bucket in parameters.buckets]
        """By bucket, the slots whose gradients need not be in its buffer to be sent."""

    def _rests(self, parameters: Parameters, shelf: Shelf, *, borrowed: bool) -> list[Rest]:
        """Room for every bucket's gradient, whole unless it is `borrowed` for each backward."""
        buckets, rank = parameters.buckets, self._group.rank
        kinds = [parameters.kind(index) for index in range(len(buckets))]
        owns = [b.interval(rank) if self._scatter else (0, b.numel) for b in buckets]
        if borrowed:
            wide = [(torch.float32 if d in NARROW else d, where) for d, where in kinds]
            if self._summation.in_tree and self._exact_sum:
                kinds = wide  # rounded to 16 bits in between, sums would depend on where that is
            # On a disk 16-bit sums are kept as wide as they will be needed; those of the tree are
            # rounded alike wherever they are made.
            widened = shelf.on_disk and not self._summation.in_tree
            tallies = self._tallies(owns, shelf, wide if widened else kinds)
            places = zip(buckets, owns, [None] * len(buckets), tallies, kinds, strict=True)
            return [Rest(index, *place) for index, place in enumerate(places)]
        rests = []
        for index, (bucket, own, kind) in enumerate(zip(buckets, owns, kinds, strict=True)):
            kept = self._group.allocate(bucket.numel, *kind)
            tally = Tally([InMemory(kept[slice(*own)])], (), kind[1])
            rests.append(Rest(index, bucket, own, kept, tally, kind))
        return rests

    def _tallies(self, owns: Sequence[Span], shelf: Shelf, kinds: Sequence[Kind]) -> list[Tally]:
        """Room for the elements `owns` of every bucket, level by level of the tree."""
        fan_ins = self._summation.fan_ins
        depth = max(len(fan_ins), 1)
        lengths = [end - first for first, end in owns for _ in range(depth)]
        each = [kind for kind in kinds for _ in range(depth)]
        helds = iter(shelf.make("gradients", lengths, each, width=min(depth, 2)))
        return [Tally([next(helds) for _ in range(depth)], fan_ins, kind[1]) for kind in kinds]

    def _straight(self, bucket: Bucket) -> list[int]:
        slots = bucket.slots if self._group.sends_pieces else ()
        return [place for place, slot in enumerate(slots) if slot.numel >= STRAIGHT]

    def launch(
        self,
        rest: Rest,
        buffer: Tensor,
        elsewhere: Mapping[int, Tensor] = _NOWHERE,
        onto: Tensor | None = None,
    ) -> None:
        """Start to reduce `buffer`, a bucket's gradients of this rank; those of the slots
        `elsewhere` are there, flat, and those of its own interval in what `onto` gave, if that is
        given: not in the buffer."""
        into = rest.in_place
        rest.squares.announce()
        each = rest.squares.add if self._summation.measure is None else None
        how = Sum(self._exact_sum, self._summation.in_tree, each)
        what = "reduce-scatter" if self._scatter else "all-reduce"
        launched = recorder.launched(what, buffer, rest.index)
        cuts, group = rest.bucket.cuts, self._group
        if onto is not None:
            handle = group.reduce_scatter_onto(onto, buffer, cuts, how)
        elif self._scatter:
            pieces = self._pieces(rest, buffer, elsewhere)
            handle = group.reduce_scatter_pieces(pieces, buffer, cuts, how, into=into)
        else:
            pieces = self._pieces(rest, buffer, elsewhere)
            handle = group.all_reduce_pieces(pieces, buffer, how)
        handle.noted(launched)
        rest.awaited = True
        if buffer is rest.kept:
            rest.sent = handle
        arrived = buffer is rest.kept or (into is not None and self._scatter)
        self._flight.append(_Flying(rest, buffer, handle, arrived))
        if len(self._flight) > LAG and (self.patient or self._group.looks):
            self._flight[-1 - LAG].handle.advance()

    def _pieces(self, rest: Rest, buffer: Tensor, elsewhere: Mapping[int, Tensor]) -> list[Tensor]:
        """What the buffer would hold, cut on all ranks where a gradient may be elsewhere."""
        pieces, end = [], 0
        for place in self.straight[rest.index]:
            slot = rest.bucket.slots[place]
            if end < slot.start:
                pieces.append(buffer[end : slot.start])
            pieces.append(elsewhere.get(place, buffer[slot.start : slot.end]))
            end = slot.end
        return pieces if pieces and end == rest.bucket.numel else [*pieces, buffer[end:]]

    def drain(self) -> Iterator[Rest]:
        """Wait for everything that was launched; yields each bucket when its sum has come."""
        for flying in self._flight:
            flying.handle.advance()
        while self._flight:
            yield self._settle_oldest()

    def _settle_oldest(self) -> Rest:
        flying = self._flight.popleft()
        flying.handle.wait()
        rest, buffer = flying.rest, flying.buffer
        read: list[Handle] = []
        if flying.arrived:
            rest.tally.arrived()
        else:
            rest.sent.reusable()  # another rank may still copy the first sum out of `kept`
            read = [rest.take_in(buffer[rest.own[0] : rest.own[1]])]
        if buffer is not rest.kept:
            self.give_back(buffer, flying.handle, *read)
        return rest

    def widen(self) -> None:
        """Let 16-bit gradients rest in fp32 from the next step on, all ranks alike.

        Done once steps turn out to have several micro-batches: their sum would soon be too large
        for 16 bits to add another one to.
        """
        narrow = [rest for rest in self.rests if rest.reduced.dtype in NARROW]
        for rest in narrow:
            if rest.kept is None:
                rest.tally.widen()
            else:
                rest.kept = rest.kept.float()
                mine = InMemory(rest.kept[rest.own[0] : rest.own[1]])
                rest.tally = Tally([mine], (), rest.kind[1])
        if narrow:
            self._landings.clear()

    def clear(self) -> None:
        """Forget the sums of this step, once no other rank reads a kept buffer any more.

        After a step's exchange that is known without waiting: no rank comes to it before it has
        read all that it needs, and messages of one rank keep their order. A step that was
        abandoned has no exchange, and waits here.
        """
        self._trim()
        for rest in self.rests:
            rest.sent.reusable()
            rest.clear()

    def _trim(self) -> None:
        """Keep as many buffers as this step had out at once: the first needs more than others."""
        for spares in self._pool.values():
            while len(spares) > max(self._most_out, IN_FLIGHT):
                spare = spares.popleft()
                spare.reusable()
                self._landings.pop(spare.buffer.data_ptr(), None)
        self._most_out = self._out

    def onto(self, rest: Rest) -> Tensor | None:
        """Where this rank's own interval of a bucket's gradients can be collected apart from the
        buffer, since the sum is made there; None where it must be in the buffer."""
        place = rest.in_place
        if place is None or not (self._scatter and self._group.sums_onto):
            return None
        return place if (place.dtype, place.device) == rest.kind else None

    def landing(self, rest: Rest, buffer: Tensor, onto: Tensor | None = None) -> Landing:
        """The bucket's place in `buffer`, a kept or a borrowed one, its own interval in `onto` if
        that is given."""
        landings = self._landings.setdefault(buffer.data_ptr(), {})
        key = rest.index, onto is not None
        if key not in landings:
            tracked = [self._parameters.tracked[slot.parameter] for slot in rest.bucket.slots]
            landings[key] = Landing(rest.bucket, tracked, buffer, rest.own, onto)
        return landings[key]

    def borrow(self, rest: Rest) -> Tensor:
        """A buffer of the bucket's length, with anything in it."""
        while sum(f.buffer is not f.rest.kept for f in self._flight) >= IN_FLIGHT:
            if not (self.patient or self._flight[0].handle.is_there()):
                break  # another buffer instead
            self._settle_oldest()
        spares = self._pool.setdefault(rest.kind, deque())
        if not spares:
            longest = max(r.bucket.numel for r in self.rests if r.kind == rest.kind)
            spares.append(_Spare(self._group.allocate(longest, *rest.kind)))
        self._out += 1
        self._most_out = max(self._out, self._most_out)
        spare = spares.popleft()
        spare.reusable()
        return spare.buffer[: rest.bucket.numel]

    def give_back(self, buffer: Tensor, *last: Handle) -> None:
        """Return what `borrow` gave; `last` are the collective and the copy that it was in."""
        self._out -= 1
        whole = buffer if buffer._base is None else buffer._base
        kind = (buffer.dtype, buffer.device)
        self._pool[kind].append(_Spare(whole, last))

    @property
    def state_bytes(self) -> int:
        """Bytes of gradient that this rank keeps between steps."""
        return sum(rest.nbytes for rest in self.rests)
