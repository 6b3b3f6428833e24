"""Sums of a bucket's gradient over the micro-batches of a step.

Usually each part is added to those before. In the exact mode parts are joined in a fixed tree,
level by level, so that the order of additions does not depend on the number of ranks:

    parts       1   2   3   4          fan-ins [2, 2]
    levels[0]   1 + 2   3 + 4
    levels[1]       └─ + ─┘            the sum of the step
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from shardwise.comm import Handle
from shardwise.layout.bucket_layout import Span
from shardwise.layout.sum_tree import MicroShards
from shardwise.states.storage import squared_sums
from shardwise.states.storage.storage import Storage


class SquareSum(Protocol):
    """Computes the sum of squares of a span of a storage, such as `squared_sums.square_span`."""

    def __call__(self, storage: Storage, own: Span, *, wide: bool = False) -> Tensor:
        """Sums of buckets and ranks add up; `wide` where squares of fp32 numbers overflow."""


@dataclass(frozen=True)
class Summation:
    """The order in which a step's gradients are summed: as they arrive, or in the exact mode's
    tree.

    As they arrive: over micro-batches and then ranks, or the other way, whatever sends less.
    """

    in_tree: bool = False
    """Whether the gradients of every backward are summed over the ranks, in the tree, before they
    are added to those of other backwards."""
    fan_ins: Sequence[int] = ()
    """How the backwards' sums are joined then."""
    square: SquareSum = squared_sums.square_span
    grain: int = 1
    """That of the layout's buckets."""


def in_tree(shards: MicroShards) -> Summation:
    """Return the summation whose bits are the same for every number of workers."""
    return Summation(True, shards.fan_ins, squared_sums.exact_row, squared_sums.GRAIN)


class GradientSum:
    """The sum in `total`: each part is added to those before."""

    def __init__(self, total: Storage) -> None:
        self.total = total
        self._is_empty = True

    @property
    def first(self) -> Storage:
        """The storage that takes the next part."""
        return self.total

    @property
    def nbytes(self) -> int:
        """Bytes that this rank keeps."""
        return self.total.nbytes

    def add(self, part: Tensor) -> tuple[Tensor | None, Handle]:
        """Add the next part, (numel,) of the interval; returns what `Storage.add` does."""
        found = self.total.add(part, fresh=self._is_empty)
        self.count_part()
        return found

    def count_part(self) -> None:
        """Note that a part was written into `first` without `add`."""
        self._is_empty = False

    def clear(self) -> None:
        """Forget the parts of this step."""
        self._is_empty = True

    def widen(self) -> None:
        """Keep the sum in fp32 from now on."""
        self.total = self.total.widened()


class TreeSum(GradientSum):
    """The exact mode's sum: level i joins `fan_ins[i]` parts of the level below.

    `device` is where parts are added.
    """

    def __init__(
        self, levels: Sequence[Storage], fan_ins: Sequence[int], device: torch.device
    ) -> None:
        super().__init__(levels[-1])
        self._levels = levels
        self._fan_ins = fan_ins
        self._device = device
        self._counts = [0] * len(levels)

    @property
    def first(self) -> Storage:
        """The lowest level."""
        return self._levels[0]

    @property
    def nbytes(self) -> int:
        """Bytes of all levels."""
        return sum(level.nbytes for level in self._levels)

    def add(self, part: Tensor) -> tuple[None, Handle]:
        """Add the next part to the lowest level. Its squares are not those of an exact norm."""
        _, read = self.first.add(part, fresh=self._counts[0] == 0)
        self.count_part()
        return None, read

    def count_part(self) -> None:
        """Count a part in the lowest level; join the levels that are complete."""
        self._counts[0] += 1
        for index, (lower, upper) in enumerate(pairwise(self._levels)):
            if self._counts[index] < self._fan_ins[index]:
                return
            fresh = self._counts[index + 1] == 0
            _, read = upper.add(lower.loaded(self._device), fresh=fresh)
            read.reusable()  # the lower level takes the next part as soon as this returns
            self._counts[index] = 0
            self._counts[index + 1] += 1

    def clear(self) -> None:
        """Forget the parts of this step."""
        self._counts = [0] * len(self._levels)

    def widen(self) -> None:
        """Widen a tree of one level; the levels of others are in fp32 from the start."""
        assert len(self._levels) == 1
        super().widen()
        self._levels = [self.total]
