"""Layout of parameters in flat buckets, cut into the intervals of ranks. Pure arithmetic.

Parameters of one dtype, device and parameter group are laid end to end in buckets, in reverse
registration order. That is nearly the order of their gradients in backward:

    bucket 0   |  head.bias  |  head.weight            | pad |
               |  rank 0              |  rank 1              |
               0                   cuts[1]               cuts[2]

Rank r owns [cuts[r], cuts[r + 1]) of every bucket, across parameter borders. If an optimizer needs
whole tensors, the cuts are on parameter borders instead, so that each tensor has one owner. No
other part of the library depends on the difference.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

Span = tuple[int, int]
"""Elements [first, end) of a flat tensor, or indices of a dim."""

ALIGNMENT = 16
"""Each parameter starts at a multiple of this many elements, because kernels are faster on aligned
memory."""


@dataclass(frozen=True, kw_only=True)
class Spec:
    """The properties of a parameter that its layout depends on."""

    name: str
    numel: int
    itemsize: int
    """Bytes of an element."""
    key: Hashable
    """Parameters with equal keys may share a bucket (dtype, device, parameter group)."""
    whole: bool = False
    """Whether one rank must own the whole tensor."""
    room: int | None = None
    """Number of elements to count when a bucket is filled, if not `numel`. It makes buckets equal
    on ranks whose parts of a split tensor differ."""


@dataclass(frozen=True)
class Slot:
    """The place of a parameter, or of a part of it, in a bucket.

    Elements [start, end) of the bucket are the elements from `offset` on of the flattened
    parameter. `parameter` is its index.
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
    """Parameters laid end to end in flat memory."""

    key: Hashable
    slots: tuple[Slot, ...]
    numel: int
    """Number of elements, with padding."""
    cuts: tuple[int, ...]
    """The borders of the ranks' intervals; one more than ranks."""
    grain: int = 1
    """Updates and norms never cut a group of this many elements. All starts and cuts are multiples
    of it, and a gap belongs to the slot before it."""

    def interval(self, rank: int) -> Span:
        """Return the elements [first, end) that `rank` owns."""
        return self.cuts[rank], self.cuts[rank + 1]

    def pieces(self, first: int, end: int) -> list[Slot]:
        """Return the parts of slots in the elements [first, end), in order, without padding."""
        pieces = []
        for slot in self.slots:
            low, high = max(slot.start, first), min(slot.end, end)
            if low < high:
                pieces.append(Slot(slot.parameter, low, high, low - slot.start))
        return pieces


def even_cuts(numel: int, size: int) -> list[int]:
    """Return the borders of `size` intervals of `numel` elements, of nearly equal length."""
    # Round each border, not each length: lengths differ by at most 1, and the remainder is spread
    # over all ranks.
    return [numel * rank // size for rank in range(size + 1)]


def lay_out(specs: Sequence[Spec], *, ranks: int, capacity: int, grain: int = 1) -> list[Bucket]:
    """Lay `specs` (in registration order) into buckets of at most `capacity` bytes for `ranks`.

    A parameter that is larger has a bucket for itself. All buckets have `grain`. They are in the
    order in which backward will probably complete them.
    """
    open_groups: dict[Hashable, list[int]] = {}  # by key, the parameters of the bucket being filled
    room: dict[Hashable, int] = {}  # by key, the bytes that are left in it
    filled: list[list[int]] = []
    for index in reversed(range(len(specs))):
        spec = specs[index]
        counted = spec.numel if spec.room is None else spec.room
        # A bucket that a further parameter would overfill is closed, even if a smaller one fits:
        # buckets stay in the order of backward.
        size = _aligned(counted, grain) * spec.itemsize
        if spec.key in open_groups and size > room[spec.key]:
            filled.append(open_groups.pop(spec.key))
        if spec.key not in open_groups:
            open_groups[spec.key], room[spec.key] = [], capacity
        open_groups[spec.key].append(index)
        room[spec.key] -= size
    filled.extend(open_groups.values())
    # A bucket is complete with the gradient of its lowest index, which backward makes last. Buckets
    # sorted by it start their collectives in about the order of completion.
    filled.sort(key=lambda group: -group[-1])
    return [_bucket(specs, group, ranks, grain) for group in filled]


def _aligned(numel: int, grain: int) -> int:
    # Both: no update may cut a grain, and vector kernels need aligned starts.
    unit = math.lcm(ALIGNMENT, grain)
    return -(-numel // unit) * unit


def _bucket(specs: Sequence[Spec], group: list[int], ranks: int, grain: int) -> Bucket:
    if specs[group[0]].whole:
        group, counts = _deal(specs, group, ranks, grain)
        slots = _slots(specs, group, grain)
        numel = slots[-1].start + _aligned(slots[-1].numel, grain)
        # Tensors are ordered by owner, so each interval starts with the first tensor of its owner.
        starts = [slot.start for slot in slots] + [numel]
        borders = [0]
        for count in counts:
            borders.append(borders[-1] + count)
        cuts = tuple(starts[border] for border in borders)
        return Bucket(specs[group[0]].key, slots, numel, cuts, grain)
    slots = _slots(specs, group, grain)
    # Equal intervals, so that one collective call suffices. The last rank's may be padding only.
    share = _aligned(-(-slots[-1].end // ranks), grain)
    cuts = tuple(share * rank for rank in range(ranks + 1))
    return Bucket(specs[group[0]].key, slots, cuts[-1], cuts, grain)


def _slots(specs: Sequence[Spec], group: Iterable[int], grain: int) -> tuple[Slot, ...]:
    slots, start = [], 0
    for index in group:
        slots.append(Slot(index, start, start + specs[index].numel))
        start += _aligned(specs[index].numel, grain)
    return tuple(slots)


def _deal(
    specs: Sequence[Spec], group: list[int], ranks: int, grain: int
) -> tuple[list[int], list[int]]:
    """Deal whole tensors to ranks, the largest first, each to the rank with the fewest elements.

    Returns the group ordered by owner, and the number of tensors of each rank.
    """
    hands: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    # "Longest processing time first" is within 4/3 of the best balance. Ties are broken by index,
    # because all ranks must compute the same result.
    for index in sorted(group, key=lambda index: (-specs[index].numel, -index)):
        owner = loads.index(min(loads))
        hands[owner].append(index)
        loads[owner] += _aligned(specs[index].numel, grain)
    for hand in hands:
        hand.sort(reverse=True)
    return [index for hand in hands for index in hand], [len(hand) for hand in hands]


def padding(buckets: Iterable[Bucket]) -> int:
    """Count the elements of all buckets that belong to no parameter."""
    return sum(bucket.numel - sum(slot.numel for slot in bucket.slots) for bucket in buckets)


def check(buckets: Sequence[Bucket], specs: Sequence[Spec], ranks: int) -> None:
    """Assert the invariants of a layout; cheap enough for every construction of an engine."""
    placed = sorted(slot.parameter for bucket in buckets for slot in bucket.slots)
    assert placed == list(range(len(specs))), "each parameter has one slot"
    for bucket in buckets:
        assert len(bucket.cuts) == ranks + 1
        assert bucket.cuts[0] == 0
        assert bucket.cuts[-1] == bucket.numel
        assert list(bucket.cuts) == sorted(bucket.cuts)
        assert all(a.end <= b.start for a, b in pairwise(bucket.slots))
        assert bucket.slots[-1].end <= bucket.numel
