"""Cuts a total batch into what ranks run: shares, or the exact mode's micro-shards.

shares          rank 0:  0 1 , 2 3      micro-batches of the contiguous share of a rank
of 8 rows       rank 1:  4 5 , 6 7
micro-shards    rank 0:  0 1 , 4 5      in turns, so that each turn's are neighbours
of 8 rows       rank 1:  2 3 , 6 7
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
    """The cut of every total batch for one rank."""

    @abstractmethod
    def count(self, rows: int) -> int:
        """How many micro-batches a total batch of `rows` makes, alike on all ranks; at least 1."""

    @abstractmethod
    def parts(self, rows: int) -> list[Rows]:
        """This rank's micro-batches of it; an empty one wants a stand-in."""

    @abstractmethod
    def all_have(self, rows: int) -> list[bool]:
        """By micro-batch of it, whether none is empty on any rank."""

    @abstractmethod
    def wholes(self, rows: int) -> list[int]:
        """By micro-batch of it, the rows of all ranks."""

    @abstractmethod
    def of_own(self, rows: int) -> list[Rows]:
        """The same of rows that are all this rank's, as many as in a full step."""

    @abstractmethod
    def stand_in(self, rows: Sequence[T]) -> list[T]:
        """What is run for an empty one."""

    @abstractmethod
    def number(self, request: int) -> int:
        """What tells micro-batch `request`, of those that this rank reads, from others."""


@dataclass(frozen=True)
class ShareCut(BatchCut):
    """Contiguous shares, in micro-batches of `micro_batch_size` rows; `full` is the total batch
    where it is known."""

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

    def wholes(self, rows: int) -> list[int]:
        return order.wholes(rows, self.size, self.micro_batch_size)

    def of_own(self, rows: int) -> list[Rows]:
        assert self.full is not None
        return order.micro_cuts((0, rows), self.micro_batch_size, self.count(self.full))

    def stand_in(self, rows: Sequence[T]) -> list[T]:
        return order.stand_in(rows, self.micro_batch_size)

    def number(self, request: int) -> int:
        return request


@dataclass(frozen=True)
class MicroShardCut(BatchCut):
    """Micro-shards of the exact mode, one in each turn."""

    shards: MicroShards

    def count(self, rows: int) -> int:
        return self.shards.turns

    def parts(self, rows: int) -> list[Rows]:
        cuts = even_cuts(rows, self.shards.count)
        numbers = [self.shards.number(turn) for turn in range(self.shards.turns)]
        return [(cuts[number], cuts[number + 1]) for number in numbers]

    def all_have(self, rows: int) -> list[bool]:
        sizes = [end - first for first, end in pairwise(even_cuts(rows, self.shards.count))]
        turn = self.shards.workers
        return [all(sizes[first : first + turn]) for first in range(0, len(sizes), turn)]

    def wholes(self, rows: int) -> list[int]:
        cuts, turn = even_cuts(rows, self.shards.count), self.shards.workers
        return [end - first for first, end in pairwise(cuts[::turn])]

    def of_own(self, rows: int) -> list[Rows]:
        raise AssertionError("refused by the checks")

    def stand_in(self, rows: Sequence[T]) -> list[T]:
        return order.stand_in(rows, None)

    def number(self, request: int) -> int:
        return self.shards.number(request)
