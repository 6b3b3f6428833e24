"""Packs parameters into flat buckets and splits each bucket among the ranks. Pure arithmetic.

Parameters with the same dtype, device and parameter group are placed end to end in buckets, in
reverse registration order. This is approximately the order in which the backward pass produces
their gradients:

    bucket 0   |  head.bias  |  head.weight            | pad |
               |  rank 0              |  rank 1              |
               0                   cuts[1]               cuts[2]

Rank r owns [cuts[r], cuts[r + 1]) of every bucket. An interval may start or end inside a parameter.
If an optimizer needs full tensors, the cuts are at parameter boundaries instead, so that each
tensor has one owner. All other code works with either kind of cut.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

Span = tuple[int, int]
"""Elements [first, end) of a flat tensor, or indices [first, end) of a dim."""

DATA = "data"
"""Axis of a bucket that all data-parallel ranks share."""

EXPERT_COPIES = "expert copies"
"""Axis of a bucket of experts, which only the ranks with the same experts share."""

ALIGNMENT = 16
"""Each parameter starts at a multiple of this many elements, because kernels are faster on aligned
memory."""


@dataclass(frozen=True, kw_only=True)
class Spec:
    """Properties of a parameter that determine its layout."""

    name: str
    numel: int
    itemsize: int
    """Size of an element in bytes."""
    key: Hashable
    """Parameters with equal keys (dtype, device, parameter group) may share a bucket."""
    whole: bool = False
    """True if a single rank must own the full tensor."""
    room: int | None = None
    """Number of elements to count when filling a bucket; `numel` if None. Ranks whose parts of a
    split tensor differ in size pass the same value, so that their buckets contain the same
    parameters."""
    axis: str = DATA
    """The ranks that share the parameter."""

    @property
    def counted(self) -> int:
        """Number of elements to count where all ranks must decide alike."""
        return self.numel if self.room is None else self.room


@dataclass(frozen=True)
class Slot:
    """The position of a parameter, or of a part of one, in a bucket.

    Elements [start, end) of the bucket hold the flattened parameter, starting with the parameter's
    element `offset`. `parameter` is the parameter's index.
    """

    parameter: int
    start: int
    end: int
    offset: int = 0

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.end - self.start


@dataclass(frozen=True)
class Bucket:
    """Parameters placed end to end in flat memory."""

    key: Hashable
    slots: tuple[Slot, ...]
    numel: int
    """Number of elements, including padding."""
    cuts: tuple[int, ...]
    """Boundaries of the ranks' intervals: one more than the number of ranks."""
    grain: int = 1
    """Updates and norms never split a group of this many elements. All starts and cuts are
    multiples of it, and a gap belongs to the slot before it."""
    axis: str = DATA
    """The ranks that share the bucket."""

    def interval(self, rank: int) -> Span:
        """Return the elements [first, end) that `rank` owns."""
        return self.cuts[rank], self.cuts[rank + 1]

    def pieces(self, first: int, end: int) -> list[Slot]:
        """Return the parts of slots inside elements [first, end), in order, without padding."""
        pieces = []
        for slot in self.slots:
            low, high = max(slot.start, first), min(slot.end, end)
            if low < high:
                pieces.append(Slot(slot.parameter, low, high, low - slot.start))
        return pieces


def even_cuts(numel: int, size: int) -> list[int]:
    """Return the boundaries of `size` nearly equal intervals of `numel` elements."""
    # Round each border, not each length: lengths differ by at most 1, and the remainder is spread
    # over all ranks.
    return [numel * rank // size for rank in range(size + 1)]


def lay_out(
    specs: Sequence[Spec],
    *,
    ranks: int,
    capacity: int,
    grain: int = 1,
    expert_copies: int = 1,
) -> list[Bucket]:
    """Pack `specs` (in registration order) into buckets of at most `capacity` bytes.

    A parameter larger than `capacity` gets its own bucket. Buckets are sorted by the order in which
    the backward pass will probably complete them. Expert buckets are split among `expert_copies`
    ranks, all others among `ranks` ranks. Every bucket gets this `grain` (see `Bucket.grain`).
    """
    sizes = {DATA: ranks, EXPERT_COPIES: expert_copies}
    open_groups: dict[Hashable, list[int]] = {}  # key -> parameters of the bucket being filled
    room: dict[Hashable, int] = {}  # key -> bytes left in that bucket
    filled: list[list[int]] = []
    # Registration order reversed is approximately the order of the backward pass.
    for index in reversed(range(len(specs))):
        spec = specs[index]
        # Close a bucket as soon as the next parameter does not fit, even if a smaller one still
        # would: buckets must follow the order of the backward pass.
        size = _aligned(spec.counted, grain) * spec.itemsize
        key = spec.key, spec.axis
        if key in open_groups and size > room[key]:
            filled.append(open_groups.pop(key))
        if key not in open_groups:
            open_groups[key], room[key] = [], capacity
        open_groups[key].append(index)
        room[key] -= size
    filled.extend(open_groups.values())
    # A bucket is complete when the gradient of its lowest index arrives, because the backward pass
    # computes that gradient last. Sorting by that index launches the collectives roughly in order
    # of completion.
    filled.sort(key=lambda group: -group[-1])
    return [_bucket(specs, group, sizes[specs[group[0]].axis], grain) for group in filled]


def _aligned(numel: int, grain: int) -> int:
    # A multiple of both: no update may split a grain, and vector kernels need aligned starts.
    unit = math.lcm(ALIGNMENT, grain)
    return -(-numel // unit) * unit


def _bucket(specs: Sequence[Spec], group: list[int], ranks: int, grain: int) -> Bucket:
    axis = specs[group[0]].axis
    if specs[group[0]].whole:
        group, counts = _deal(specs, group, ranks, grain)
        slots = _slots(specs, group, grain)
        numel = slots[-1].start + _aligned(slots[-1].numel, grain)
        # Tensors are ordered by owner, so each interval starts at its owner's first tensor.
        starts = [slot.start for slot in slots] + [numel]
        borders = [0]
        for count in counts:
            borders.append(borders[-1] + count)
        cuts = tuple(starts[border] for border in borders)
        return Bucket(specs[group[0]].key, slots, numel, cuts, grain, axis)
    slots = _slots(specs, group, grain)
    # Equal intervals, so that a single collective call suffices. The last rank may own only
    # padding.
    share = _aligned(-(-slots[-1].end // ranks), grain)
    cuts = tuple(share * rank for rank in range(ranks + 1))
    return Bucket(specs[group[0]].key, slots, cuts[-1], cuts, grain, axis)


def _slots(specs: Sequence[Spec], group: Iterable[int], grain: int) -> tuple[Slot, ...]:
    slots, start = [], 0
    for index in group:
        slots.append(Slot(index, start, start + specs[index].numel))
        start += _aligned(specs[index].numel, grain)
    return tuple(slots)


def _deal(
    specs: Sequence[Spec], group: list[int], ranks: int, grain: int
) -> tuple[list[int], list[int]]:
    """Assign full tensors to ranks, the largest first, each to the least loaded rank.

    Returns the tensors' indices ordered by owner, and the number of tensors per rank.
    """
    hands: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    # This greedy rule ("longest processing time first") is within 4/3 of the best balance. Break
    # ties by index, because all ranks must compute the same result.
    for index in sorted(group, key=lambda index: (-specs[index].counted, -index)):
        owner = loads.index(min(loads))
        hands[owner].append(index)
        loads[owner] += _aligned(specs[index].counted, grain)
    for hand in hands:
        # Within a rank, keep reverse registration order, as in all other buckets.
        hand.sort(reverse=True)
    return [index for hand in hands for index in hand], [len(hand) for hand in hands]


def padding(buckets: Iterable[Bucket]) -> int:
    """Return the total number of padding elements in all buckets."""
    return sum(bucket.numel - sum(slot.numel for slot in bucket.slots) for bucket in buckets)


def check(
    buckets: Sequence[Bucket], specs: Sequence[Spec], ranks: int, expert_copies: int = 1
) -> None:
    """Assert the invariants of a layout. This is cheap enough to run for every new engine."""
    placed = sorted(slot.parameter for bucket in buckets for slot in bucket.slots)
    assert placed == list(range(len(specs))), "each parameter has one slot"
    for bucket in buckets:
        assert len(bucket.cuts) == (ranks if bucket.axis == DATA else expert_copies) + 1
        assert bucket.cuts[0] == 0
        assert bucket.cuts[-1] == bucket.numel
        assert list(bucket.cuts) == sorted(bucket.cuts)
        assert all(a.end <= b.start for a, b in pairwise(bucket.slots))
        assert bucket.slots[-1].end <= bucket.numel
