"""Computes the positions of parameters in the flat partitions that DeepSpeed saves. No I/O.

Stages 1 and 2 concatenate the parameters of a group and split the result into one partition per
rank. Stage 3 splits each parameter separately, and a rank's partition is the concatenation of its
parts:

    stages 1, 2   | first.weight   first.bia|s  second.weight  pad |     rank 0 | rank 1
    stage 3       | first.weight[:half]  first.bias[:half] ... |         rank 0 of 2
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from math import prod


@dataclass(frozen=True)
class Cut:
    """A part of a parameter in one rank's partition.

    The part starts at element `first` of the parameter and has `count` elements. Rank `rank` stores
    it in its partition, starting at element `at`.
    """

    rank: int
    at: int
    first: int
    count: int


Shapes = Mapping[str, Sequence[int]]
"""Shapes of a group's parameters by name, in order of concatenation."""


def end_to_end(
    shapes: Shapes, partition: int, ranks: int, paddings: Sequence[int] | None = None
) -> dict[str, list[Cut]]:
    """Return each parameter's parts in the partitions of a stage-1 or stage-2 group, by name.

    Args:
        shapes: Shapes of the group's parameters.
        partition: Number of elements in each rank's partition.
        ranks: Number of ranks that share the group.
        paddings: Number of padding elements after each parameter, or None if there is no padding.
    """
    cuts: dict[str, list[Cut]] = {}
    start = 0
    for (name, shape), padding in zip(shapes.items(), paddings or repeat(0), strict=False):
        end = start + prod(shape)
        cuts[name] = [
            Cut(rank, low - rank * partition, low - start, high - low)
            for rank in range(ranks)
            if (low := max(start, rank * partition)) < (high := min(end, (rank + 1) * partition))
        ]
        # Some optimizers pad each parameter for alignment. The padding belongs to no cut.
        start = end + padding
    return cuts


def each_by_itself(shapes: Shapes, ranks: int) -> dict[str, list[Cut]]:
    """Return each parameter's parts in the partitions of a stage-3 group, by name.

    Each parameter is split into one part per rank, all of the same length. The last parts are
    padded.
    """
    cuts: dict[str, list[Cut]] = {}
    at = 0
    for name, shape in shapes.items():
        numel = prod(shape)
        # Rounded up, so the last ranks' parts may hold fewer elements, or only padding.
        part = -(-numel // ranks)
        cuts[name] = [
            Cut(rank, at, rank * part, count)
            for rank in range(ranks)
            if (count := min(part, numel - rank * part)) > 0
        ]
        at += part
    return cuts
