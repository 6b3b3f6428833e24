"""Accumulates a bucket's gradient over the micro-batches of a step.

Usually each part is added to those before. In the exact mode parts are joined in a fixed tree,
level by level, so that what is added to what does not depend on how many ranks there are:

    parts       1   2   3   4          fan-ins [2, 2]
    levels[0]   1 + 2   3 + 4
    levels[1]       └─ + ─┘            the sum of the step
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from shardwise.comm import Handle
from shardwise.layout.bucket_layout import Bucket
from shardwise.layout.sum_tree import MicroShards
from shardwise.states.gradients import exact_squared_sums
from shardwise.states.storage.storage import MemoryStorage, Span, Storage


class ExactRow(Protocol):
    """Counts the squares of a span of a storage; see `exact_squared_sums.exact_row`."""

    def __call__(self, storage: Storage, own: Span, *, wide: bool = False) -> Tensor:
        """Rows of buckets and ranks add up; `wide` where squares of fp32 numbers overflow."""


@dataclass(frozen=True)
class Summation:
    """The order in which a step's gradients are summed: as they come, or in the exact mode's tree.

    As they come: over micro-batches and then ranks, or the other way, whatever moves less.
    """

    in_tree: bool = False
    """Whether every backward's gradients are summed over the ranks, in the tree, before they meet
    those of other backwards."""
    fan_ins: Sequence[int] = ()
    """How the backwards' sums are joined then."""
    exact_row: ExactRow | None = None
    """What counts the squares of a sum exactly; None where they may be rounded on the way."""
    grain: int = 1
    """That of the layout's buckets."""


def in_tree(shards: MicroShards) -> Summation:
    """The summation whose bits are the same for every number of workers."""
    return Summation(True, shards.fan_ins, exact_squared_sums.exact_row, exact_squared_sums.GRAIN)


class GradientAccumulator:
    """Adds up one bucket's gradient; `device` is where its parts come from.

    Level i joins `fan_ins[i]` parts of the level below, and the last one all that come to it.
    """

    def __init__(
        self, levels: Sequence[Storage], fan_ins: Sequence[int], device: torch.device
    ) -> None:
        assert len(levels) == max(len(fan_ins), 1)
        self.levels = list(levels)
        self._fan_ins = fan_ins
        self._device = device
        self._counts = [0] * len(levels)

    @property
    def total(self) -> Storage:
        """The sum, once all parts of a step have come."""
        return self.levels[-1]

    @property
    def nbytes(self) -> int:
        """Bytes of all levels, where they rest."""
        return sum(level.nbytes for level in self.levels)

    @property
    def is_complete(self) -> bool:
        """Whether all parts of a step have come, as far as is known."""
        return not self._fan_ins or self._counts[-1] == self._fan_ins[-1]

    def add(self, part: Tensor) -> tuple[Tensor | None, Handle]:
        """Add the next part, of the interval's length; returns what `Storage.add` does."""
        squares, read = self.levels[0].add(part, fresh=self._counts[0] == 0)
        self.count_part()
        return squares, read

    def count_part(self) -> None:
        """Count a part that lies in the lowest level already; join the levels that are complete."""
        self._counts[0] += 1
        for index, (lower, upper) in enumerate(pairwise(self.levels)):
            if self._counts[index] < self._fan_ins[index]:
                return
            fresh = self._counts[index + 1] == 0
            _, read = upper.add(lower.loaded(self._device), fresh=fresh)
            read.reusable()  # the lower level takes the next part as soon as this returns
            self._counts[index] = 0
            self._counts[index + 1] += 1

    def clear(self) -> None:
        """Forget the parts of this step."""
        self._counts = [0] * len(self.levels)

    def widen(self) -> None:
        """Let the sum rest in fp32."""
        assert len(self.levels) == 1, "the levels of a tree are wide"
        self.levels = [self.total.widened()]


@dataclass(eq=False)
class GradientBucket:
    """One bucket's gradient on this rank: its buffer, if it has one for good, and its sum.

    `own` are the elements whose sum this rank needs: its interval, or all of them. `kept` is the
    whole buffer where micro-batches add up before they are reduced. `accumulator` has the elements
    `own`, of which a sum of this step is `awaited` once launched.
    """

    index: int
    layout: Bucket
    own: tuple[int, int]
    kept: Tensor | None
    accumulator: GradientAccumulator
    kind: tuple[torch.dtype, torch.device]
    """Of the buffers that gradients are collected in."""
    awaited: bool = False
    squares: Tensor | None = None
    """The sum of squares, where it was made on the way to a disk or to the host."""
    sent: Handle = field(default_factory=Handle)
    """The collective that `kept` went into: others may read it until that is reusable."""

    @property
    def nbytes(self) -> int:
        """Bytes that this rank keeps between steps."""
        return self.accumulator.nbytes if self.kept is None else self.kept.nbytes

    @property
    def reduced(self) -> Storage:
        """The reduced gradient of the elements `own`."""
        return self.accumulator.total

    @property
    def in_place(self) -> Tensor | None:
        """Memory that the next sum can come to without a copy: the first of a step."""
        storage = self.accumulator.levels[0]
        free = self.kept is None and not self.awaited
        return storage.tensor if free and isinstance(storage, MemoryStorage) else None

    def accumulate(self, part: Tensor) -> Handle:
        """Add `part`, a sum over the ranks, to this step's.

        `part` may be written again when the handle is `reusable`.
        """
        self.squares, read = self.accumulator.add(part)
        return read

    def clear(self) -> None:
        """Forget the sum of this step."""
        self.awaited = False
        self.accumulator.clear()
        self.squares = None
