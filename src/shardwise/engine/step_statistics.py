"""A step and the backwards that it is made of: how what ranks tell of them becomes one."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from shardwise.errors import UsageError
from shardwise.randomness import seed_from
from shardwise.states import squared_sums
from shardwise.sum_tree import MicroShards

Number = float | Tensor


class Parts:
    """As many backwards as the script makes, each rank's added up before they are told.

    `row` lengths are in numbers; `rows` have one row of each rank.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def seed(self, seed: int, engine: int, step: int, backwards: int) -> int | None:
        """The seed of what is drawn after `backwards` of `step`; None to go on as it is."""
        return None if backwards else seed_from(seed, "step", engine, step, self._rank)

    def first_step(self, weights: Sequence[float]) -> tuple[float, int]:
        """About the weight of a whole step and the number of its backwards, from the weight of the
        first one on each rank."""
        return sum(weights), sum(weight > 0 for weight in weights)

    def check(self, backwards: int) -> None:
        """Raise UsageError where a step cannot have that many."""

    def told(self, values: Sequence[Number]) -> list[Number]:
        """What a rank tells of a number that it has of each backward."""
        return [sum(values)]

    def joined(self, rows: Sequence[Sequence[float]]) -> float:
        """The sum of what all ranks told."""
        return sum(row[0] for row in rows)

    def joined_squares(self, rows: Sequence[Sequence[float]]) -> float:
        """The same of sums of squares."""
        return self.joined(rows)

    def refuse_late(self, names: Sequence[str]) -> None:
        """Gradients of the parameters `names` came after their bucket's sum had begun."""


class ExactParts(Parts):
    """The exact mode: one backward for each micro-shard, told one by one; sums are rounded once."""

    def __init__(self, shards: MicroShards) -> None:
        super().__init__(shards.rank)
        self._shards = shards

    def seed(self, seed: int, engine: int, step: int, backwards: int) -> int | None:
        """By micro-shard, whichever rank runs it."""
        number = self._shards.number(backwards)
        return seed_from(seed, "micro-shard", engine, step, number)

    def first_step(self, weights: Sequence[float]) -> tuple[float, int]:
        """The first micro-shard is rank 0's, for any number of ranks."""
        return weights[0] * self._shards.count, self._shards.count

    def check(self, backwards: int) -> None:
        shards = self._shards
        if backwards != shards.turns:
            raise UsageError(
                f"--exact {shards.count} on {shards.workers} worker(s) takes {shards.turns} "
                f"backward(s) per worker and step, and this step had {backwards}. Write "
                "`for step in loader.steps():`, in it `for x, y in step: engine.backward(...)`, "
                "then engine.step() once."
            )

    def told(self, values: Sequence[Number]) -> list[Number]:
        return list(values)

    def joined(self, rows: Sequence[Sequence[float]]) -> float:
        values = [value for row in rows for value in row]
        # fsum, exact in any order, raises where infinities meet; addition gives the NaN they make.
        return math.fsum(values) if all(map(math.isfinite, values)) else sum(values)

    def joined_squares(self, rows: Sequence[Sequence[float]]) -> float:
        return squared_sums.exact_total(rows)

    def refuse_late(self, names: Sequence[str]) -> None:
        raise UsageError(
            f"--exact {self._shards.count}: the gradient of {names[0]}"
            f"{f' and {len(names) - 1} more' if len(names) > 1 else ''} came after the sum that it "
            "belongs to had begun, since it had not come before, or comes twice (reentrant "
            "checkpointing). Sums then would depend on the number of workers: --no-overlap lets "
            "them begin when backward has ended."
        )
