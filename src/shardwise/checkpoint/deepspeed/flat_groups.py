"""Computes where each parameter lies in the flat partitions that DeepSpeed saves. Pure.

Stages 1 and 2 lay the parameters of a group end to end and cut the whole vector into one partition
per rank; stage 3 cuts each parameter by itself, and lays a rank's cuts of a group end to end:

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
    """Elements `first` to `first + count` of a parameter: from element `at` on in the partition of
    `rank`."""

    rank: int
    at: int
    first: int
    count: int


Shapes = Mapping[str, Sequence[int]]
"""The shapes of a group's parameters by name, in the order in which they lie."""


def end_to_end(
    shapes: Shapes, partition: int, ranks: int, paddings: Sequence[int] | None = None
) -> dict[str, list[Cut]]:
    """The cuts of a group that `ranks` share in partitions of `partition` elements; `paddings` are
    the elements that follow each parameter."""
    cuts: dict[str, list[Cut]] = {}
    start = 0
    for (name, shape), padding in zip(shapes.items(), paddings or repeat(0), strict=False):
        end = start + prod(shape)
        cuts[name] = [
            Cut(rank, low - rank * partition, low - start, high - low)
            for rank in range(ranks)
            if (low := max(start, rank * partition)) < (high := min(end, (rank + 1) * partition))
        ]
        start = end + padding
    return cuts


def each_by_itself(shapes: Shapes, ranks: int) -> dict[str, list[Cut]]:
    """The cuts of a group of stage 3: equal shares, of which the last are padded."""
    cuts: dict[str, list[Cut]] = {}
    at = 0
    for name, shape in shapes.items():
        numel = prod(shape)
        each = -(-numel // ranks)
        cuts[name] = [
            Cut(rank, at, rank * each, count)
            for rank in range(ranks)
            if (count := min(each, numel - rank * each)) > 0
        ]
        at += each
    return cuts
