"""Positions of parameters in the flat partitions that DeepSpeed saves. Pure.

Stages 1 and 2 concatenate the parameters of a group, and split the result into one partition per
rank. Stage 3 splits each parameter separately, and concatenates a rank's parts of a group:

    stages 1, 2   | first.weight   first.bia|s  second.weight  pad |     rank 0 | rank 1
    stage 3       | first.weight[:half]  first.bias[:half] ... |         each rank
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from math import prod


@dataclass(frozen=True)
class Cut:
    """Elements `first` to `first + count` of a parameter. They start at element `at` of the
    partition of `rank`."""

    rank: int
    at: int
    first: int
    count: int


Shapes = Mapping[str, Sequence[int]]
"""Shapes of a group's parameters by name, in order of concatenation."""


def end_to_end(
    shapes: Shapes, partition: int, ranks: int, paddings: Sequence[int] | None = None
) -> dict[str, list[Cut]]:
    """Return the cuts of a group of stages 1 and 2.

    Args:
        partition: Number of elements per partition.
        ranks: Number of ranks that share the group.
        paddings: Number of padding elements after each parameter.
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
        # Some optimizers align each parameter; the padding belongs to no cut.
        start = end + padding
    return cuts


def each_by_itself(shapes: Shapes, ranks: int) -> dict[str, list[Cut]]:
    """Return the cuts of a group of stage 3: equal parts, the last ones padded."""
    cuts: dict[str, list[Cut]] = {}
    at = 0
    for name, shape in shapes.items():
        numel = prod(shape)
        # Rounded up: ranks have equally long parts, so the last ones may be short or empty.
        part = -(-numel // ranks)
        cuts[name] = [
            Cut(rank, at, rank * part, count)
            for rank in range(ranks)
            if (count := min(part, numel - rank * part)) > 0
        ]
        at += part
    return cuts
