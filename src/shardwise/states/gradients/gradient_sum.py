"""Sums a bucket's gradients over the micro-batches of a step.

Usually each part is added to the running sum. In the exact mode, parts are added in a fixed tree,
level by level, so that the order of additions does not depend on the number of ranks:

    parts       1   2   3   4          fan-ins [2, 2]
    levels[0]   1 + 2   3 + 4
    levels[1]       └─ + ─┘            the sum of the step
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
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
    """Computes the sum of squares over a span of a storage. See `squared_sums.square_span`."""

    def __call__(self, storage: Storage, own: Span, *, wide: bool = False) -> Tensor:
        """Return a sum of squares that can be added across buckets and ranks.

        `wide` avoids fp32 overflow.
        """


@dataclass(frozen=True)
class Summation:
    """How a step's gradients are added up: in the exact mode's tree or in the cheaper order.

    Without the tree, the engine sums either over micro-batches first or over ranks first, whichever
    sends less.
    """

    in_tree: bool = False
    """True if each backward pass's gradients are summed across ranks, in the tree, before the sums
    of several backward passes are added."""
    fan_ins: Sequence[int] = ()
    """Fan-in of each tree level: how many backward passes' sums are added into one."""
    square: SquareSum = squared_sums.square_span
    grain: int = 1
    """Grain of the bucket layout: no interval splits a group of this many elements."""


def in_tree(shards: MicroShards, pieces: Sequence[int] = ()) -> Summation:
    """Return the exact mode's summation, which is bit-identical for any number of workers.

    Args:
        shards: This worker's micro-shards.
        pieces: Numbers of elements at whose multiples parameters are divided among workers.
    """
    # Usually 64: only tensors of odd shapes need smaller groups of squares.
    grain = math.gcd(squared_sums.GRAIN, *pieces)
    square = partial(squared_sums.exact_row, grain=grain)
    return Summation(True, shards.fan_ins, square, squared_sums.GRAIN)


class GradientSum:
    """The running sum of a step's gradients, stored in `total`."""

    def __init__(self, total: Storage) -> None:
        self.total = total
        self._is_empty = True

    @property
    def first(self) -> Storage:
        """The storage that receives the next part."""
        return self.total

    @property
    def nbytes(self) -> int:
        """Size in bytes of the memory that the sum occupies."""
        return self.total.nbytes

    def add(self, part: Tensor) -> tuple[Tensor | None, Handle]:
        """Add the next part, shape (numel of the interval,). Return the result of `Storage.add`."""
        result = self.total.add(part, fresh=self._is_empty)
        self.count_part()
        return result

    def count_part(self) -> None:
        """Record that a part was written into `first` without `add`."""
        self._is_empty = False

    def clear(self) -> None:
        """Discard the parts of this step."""
        self._is_empty = True

    def widen(self) -> None:
        """Store the sum in fp32 from now on."""
        self.total = self.total.widened()


class TreeSum(GradientSum):
    """The exact mode's sum. `fan_ins[i]` sums of level i are added up into one of level i + 1.

    The additions run on `device`.
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
        """The storage of the lowest level, which receives the next part."""
        return self._levels[0]

    @property
    def nbytes(self) -> int:
        """Size of all levels in bytes."""
        return sum(level.nbytes for level in self._levels)

    def add(self, part: Tensor) -> tuple[None, Handle]:
        """Add the next part to the lowest level.

        Returns None instead of a sum of squares, because only the complete sum can be squared.
        """
        _, read = self.first.add(part, fresh=self._counts[0] == 0)
        self.count_part()
        return None, read

    def count_part(self) -> None:
        """Count a part in the lowest level. Add each level that is now complete to the next one."""
        self._counts[0] += 1
        for index, (lower, upper) in enumerate(pairwise(self._levels)):
            if self._counts[index] < self._fan_ins[index]:
                return
            # This level is complete: its sum is one part of the level above.
            fresh = self._counts[index + 1] == 0
            _, read = upper.add(lower.loaded(self._device), fresh=fresh)
            read.reusable()  # the next part may overwrite the lower level once this method returns
            self._counts[index] = 0
            self._counts[index + 1] += 1

    def clear(self) -> None:
        self._counts = [0] * len(self._levels)

    def widen(self) -> None:
        """Widen a tree that has a single level. Deeper trees are in fp32 from the start."""
        assert len(self._levels) == 1
        super().widen()
        self._levels = [self.total]
