"""Lays parameters into flat buckets, and cuts these into the intervals of ranks. Pure arithmetic.

Parameters of one dtype, device and parameter group are laid end to end in buckets, in the
reverse of registration order, which is nearly the order in which backward makes gradients:

    bucket 0   |  head.bias  |  head.weight            | pad |
               |  rank 0              |  rank 1              |
               0                   cuts[1]               cuts[2]

Rank r owns [cuts[r], cuts[r + 1]) of every bucket, across parameter borders. Where an optimizer
needs whole tensors the cuts fall on parameter borders instead, so that each tensor has one
owner. Nothing else in the library knows the difference.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

ALIGNMENT = 16
"""Elements to which each parameter's start is rounded up, so that kernels see aligned memory."""


@dataclass(frozen=True, kw_only=True)
class Spec:
    """A parameter as the layout sees it.

    `key` says what may share a bucket (dtype, device, parameter group). `whole` asks for an
    owner of the whole tensor. `itemsize` is in bytes. `room` is how many elements it counts as
    where buckets are filled, so that they are alike on ranks whose parts of a tensor differ.
    """

    name: str
    numel: int
    itemsize: int
    key: Hashable
    whole: bool = False
    room: int | None = None


@dataclass(frozen=True)
class Slot:
    """Where parameter `parameter` (its index) lies in a bucket: elements [start, start + numel)."""

    parameter: int
    start: int
    numel: int

    @property
    def end(self) -> int:
        return self.start + self.numel


@dataclass(frozen=True)
class Piece:
    """The part of a slot that lies in an interval.

    Elements [start, end) of the bucket, which are elements [offset, offset + end - start) of the
    flattened parameter.
    """

    parameter: int
    start: int
    end: int
    offset: int


@dataclass(frozen=True)
class Bucket:
    """Parameters laid end to end; `cuts` are the ranks' intervals, `numel` counts the padding."""

    key: Hashable
    slots: tuple[Slot, ...]
    numel: int
    cuts: tuple[int, ...]
    grain: int = 1
    """Elements of which no update and no norm takes a part only: all starts and cuts are multiples
    of it, and gaps belong to what lies before them."""

    def interval(self, rank: int) -> tuple[int, int]:
        """The elements [first, end) that `rank` owns."""
        return self.cuts[rank], self.cuts[rank + 1]

    def pieces(self, first: int, end: int) -> list[Piece]:
        """What lies in the elements [first, end), in order; padding is in no piece."""
        found = []
        for slot in self.slots:
            low, high = max(slot.start, first), min(slot.end, end)
            if low < high:
                found.append(Piece(slot.parameter, low, high, low - slot.start))
        return found


def even_cuts(numel: int, size: int) -> list[int]:
    """Offsets that cut `numel` elements into `size` intervals as equal as can be."""
    return [numel * rank // size for rank in range(size + 1)]


def lay_out(specs: Sequence[Spec], *, ranks: int, capacity: int, grain: int = 1) -> list[Bucket]:
    """Lay `specs` (in registration order) into buckets of at most `capacity` bytes for `ranks`.

    A parameter larger than that has a bucket of its own. `grain` is that of the buckets. They come
    in the order in which backward is likely to complete them.
    """
    open_groups: dict[Hashable, list[int]] = {}
    room: dict[Hashable, int] = {}
    filled: list[list[int]] = []
    for index in reversed(range(len(specs))):
        spec = specs[index]
        counted = spec.numel if spec.room is None else spec.room
        size = _aligned(counted, grain) * spec.itemsize
        if spec.key in open_groups and size > room[spec.key]:
            filled.append(open_groups.pop(spec.key))
        if spec.key not in open_groups:
            open_groups[spec.key], room[spec.key] = [], capacity
        open_groups[spec.key].append(index)
        room[spec.key] -= size
    filled.extend(open_groups.values())
    # A bucket is complete when its last parameter is, and that is its lowest index.
    filled.sort(key=lambda group: -group[-1])
    return [_bucket(specs, group, ranks, grain) for group in filled]


def _aligned(numel: int, grain: int) -> int:
    unit = math.lcm(ALIGNMENT, grain)
    return -(-numel // unit) * unit


def _bucket(specs: Sequence[Spec], group: list[int], ranks: int, grain: int) -> Bucket:
    if specs[group[0]].whole:
        group, loads = _dealt(specs, group, ranks, grain)
        slots = _slots(specs, group, grain)
        numel = slots[-1].start + _aligned(slots[-1].numel, grain)
        starts = [slot.start for slot in slots] + [numel]
        borders = [0]
        for load in loads:
            borders.append(borders[-1] + load)
        cuts = tuple(starts[border] for border in borders)
        return Bucket(specs[group[0]].key, slots, numel, cuts, grain)
    slots = _slots(specs, group, grain)
    share = _aligned(-(-slots[-1].end // ranks), grain)
    cuts = tuple(share * rank for rank in range(ranks + 1))
    return Bucket(specs[group[0]].key, slots, cuts[-1], cuts, grain)


def _slots(specs: Sequence[Spec], group: Iterable[int], grain: int) -> tuple[Slot, ...]:
    slots, start = [], 0
    for index in group:
        slots.append(Slot(index, start, specs[index].numel))
        start += _aligned(specs[index].numel, grain)
    return tuple(slots)


def _dealt(
    specs: Sequence[Spec], group: list[int], ranks: int, grain: int
) -> tuple[list[int], list[int]]:
    """Deal whole tensors to ranks, the largest first to whoever has least.

    Returns the group ordered by owner and how many tensors each rank got.
    """
    hands: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for index in sorted(group, key=lambda index: (-specs[index].numel, -index)):
        owner = loads.index(min(loads))
        hands[owner].append(index)
        loads[owner] += _aligned(specs[index].numel, grain)
    for hand in hands:
        hand.sort(reverse=True)
    return [index for hand in hands for index in hand], [len(hand) for hand in hands]


def padding(buckets: Iterable[Bucket]) -> int:
    """Elements of all buckets that belong to no parameter."""
    return sum(bucket.numel - sum(slot.numel for slot in bucket.slots) for bucket in buckets)


def check(buckets: Sequence[Bucket], specs: Sequence[Spec], ranks: int) -> None:
    """Assert what every layout promises; for tests, and cheap enough to run at each build."""
    placed = sorted(slot.parameter for bucket in buckets for slot in bucket.slots)
    assert placed == list(range(len(specs))), "each parameter lies in one slot"
    for bucket in buckets:
        assert len(bucket.cuts) == ranks + 1
        assert bucket.cuts[0] == 0
        assert bucket.cuts[-1] == bucket.numel
        assert list(bucket.cuts) == sorted(bucket.cuts)
        assert all(a.end <= b.start for a, b in pairwise(bucket.slots))
        assert bucket.slots[-1].end <= bucket.numel
