"""Splits each global batch into the ranks' micro-batches: shares or, in exact mode, micro-shards.

A global batch of 8 rows on 2 ranks:

    shares          rank 0:  0 1 , 2 3      each rank has contiguous rows
                    rank 1:  4 5 , 6 7
    micro-shards    rank 0:  0 1 , 4 5      each micro-batch is contiguous across ranks
                    rank 1:  2 3 , 6 7
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

from shardwise.data import order
from shardwise.data.order import Rows
from shardwise.layout.bucket_layout import even_cuts
from shardwise.layout.sum_tree import MicroShards

T = TypeVar("T")


class BatchCut(ABC):
    """Splits every global batch into one rank's micro-batches."""

    @abstractmethod
    def count(self, rows: int) -> int:
        """Return the number of micro-batches in a global batch of `rows` rows.

        The number is at least 1, and the same on all ranks.
        """

    @abstractmethod
    def parts(self, rows: int) -> list[Rows]:
        """Return the rows of each of this rank's micro-batches. Empty ones need `stand_in`."""

    @abstractmethod
    def all_have(self, rows: int) -> list[bool]:
        """Return, for each micro-batch, whether every rank has at least one row in it."""

    @abstractmethod
    def total_rows(self, rows: int) -> list[int]:
        """Return, for each micro-batch, the total number of rows on all ranks."""

    @abstractmethod
    def own_part_rows(self, rows: int) -> list[Rows]:
        """Split `rows` rows that only this rank reads into as many micro-batches as a step has."""

    @abstractmethod
    def stand_in(self, rows: Sequence[T]) -> list[T]:
        """Return the rows to use in place of an empty micro-batch."""

    @abstractmethod
    def number(self, request: int) -> int:
        """Return the number that seeds `collate_fn` for micro-batch `request` of this rank."""


@dataclass(frozen=True)
class ShareCut(BatchCut):
    """Splits a global batch into contiguous shares, and shares into micro-batches.

    `full` is the size of a global batch, or None if a batch sampler determines it.
    """

    size: int
    rank: int
    micro_batch_size: int | None
    full: int | None

    def count(self, rows: int) -> int:
        return order.micro_batches(rows, self.size, self.micro_batch_size)

    def parts(self, rows: int) -> list[Rows]:
        return order.parts(rows, self.size, self.rank, self.micro_batch_size)

    def all_have(self, rows: int) -> list[bool]:
        return [order.all_have(rows // self.size, part) for part in range(self.count(rows))]

    def total_rows(self, rows: int) -> list[int]:
        return order.total_rows(rows, self.size, self.micro_batch_size)

    def own_part_rows(self, rows: int) -> list[Rows]:
        assert self.full is not None
        return order.micro_cuts((0, rows), self.micro_batch_size, self.count(self.full))

    def stand_in(self, rows: Sequence[T]) -> list[T]:
        return order.stand_in(rows, self.micro_batch_size)

    def number(self, request: int) -> int:
        return request


@dataclass(frozen=True)
class MicroShardCut(BatchCut):
    """Splits a global batch into micro-shards for exact mode. A rank computes one per turn."""

    shards: MicroShards

    def count(self, rows: int) -> int:
        return self.shards.turns

    def parts(self, rows: int) -> list[Rows]:
        # The cuts depend on the number of micro-shards and never on the world size, because the
        # leaves of the sum tree must be the same at every world size.
        cuts = even_cuts(rows, self.shards.count)
        numbers = [self.shards.number(turn) for turn in range(self.shards.turns)]
        return [(cuts[number], cuts[number + 1]) for number in numbers]

    def all_have(self, rows: int) -> list[bool]:
        sizes = [end - first for first, end in pairwise(even_cuts(rows, self.shards.count))]
        turn = self.shards.workers
        return [all(sizes[first : first + turn]) for first in range(0, len(sizes), turn)]

    def total_rows(self, rows: int) -> list[int]:
        cuts, turn = even_cuts(rows, self.shards.count), self.shards.workers
        return [end - first for first, end in pairwise(cuts[::turn])]

    def own_part_rows(self, rows: int) -> list[Rows]:
        raise AssertionError('LoaderArguments.check refuses sharding="dataset" with --exact')

    def stand_in(self, rows: Sequence[T]) -> list[T]:
        return order.stand_in(rows, None)

    def number(self, request: int) -> int:
        return self.shards.number(request)
