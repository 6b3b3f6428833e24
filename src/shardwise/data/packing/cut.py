"""Divides the packed rows of each step among ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from shardwise.data.source import MicroBatch
from shardwise.data.token_budget import TokenBudget, balance, extend_share
from shardwise.layout.sum_tree import MicroShards


@dataclass(frozen=True)
class PackedCut:
    """Splits each step's packed rows for one rank: balanced shares, or micro-shards.

    All ranks pack all rows of a step, because rows must not depend on the number of ranks.
    """

    budget: TokenBudget
    size: int
    rank: int
    shards: MicroShards | None

    def turns(self, rows: Sequence[Sequence[int]], lengths: Sequence[int]) -> list[list[list[int]]]:
        """Return the row numbers in each micro-batch of each rank.

        Args:
            rows: The items of each row of a step.
            lengths: The length of each item.

        Returns:
            Row numbers, indexed as `result[turn][rank]`.
        """
        # Every row costs a full row in most layers, so ranks get the same number of rows first.
        works = [sum(self.budget.work(lengths[item]) for item in row) for row in rows]
        if self.shards is not None:
            leaves = balance(works, self.shards.count, same_number=True)
            width = self.shards.workers
            return [leaves[first : first + width] for first in range(0, len(leaves), width)]
        packing, most = self.budget.packing, self.budget.micro_batch_tokens
        assert packing is not None
        each = len(rows) if most is None else most // packing.row
        shares = [
            [share[first : first + each] for first in range(0, len(share), each)] or [[]]
            for share in balance(works, self.size, same_number=True)
        ]
        # All ranks reduce gradients in each micro-batch, so all run the same number.
        count = max(map(len, shares))
        shares = [extend_share(share, count) for share in shares]
        return [[share[turn] for share in shares] for turn in range(count)]

    def micro_batches(self, steps: Iterable[Sequence[int]], epoch: int) -> Iterator[MicroBatch]:
        """Yield this rank's micro-batches of `steps`. The stand-in is the step's first row."""
        own = self.rank if self.shards is None else self.shards.rank
        all_lengths, packing = self.budget.lengths, self.budget.packing
        assert all_lengths is not None
        assert packing is not None
        for step in steps:
            lengths = [all_lengths[index] for index in step]
            rows = self.budget.rows_of(lengths)
            turns = self.turns(rows, lengths)
            for part, ranks in enumerate(turns):
                counts = [sum(len(rows[number]) for number in numbers) for numbers in ranks]
                used = [rows[number] for number in ranks[own] or [0]]
                items = [item for row in used for item in row]
                tokens = sum(lengths[i] for numbers in ranks for n in numbers for i in rows[n])
                yield MicroBatch(
                    epoch=epoch,
                    part=part,
                    parts=len(turns),
                    total=len(step),
                    samples=counts[own],
                    whole=sum(counts),
                    place=None,
                    indices=tuple(step[item] for item in items),
                    all_have=all(ranks),
                    packed=tuple(tuple(lengths[item] for item in row) for row in used),
                    tokens=tokens,
                    # A rank without rows computes one as its stand-in.
                    positions=packing.row * sum(max(len(numbers), 1) for numbers in ranks),
                )
