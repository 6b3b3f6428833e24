"""Implements exact mode, in which results are bit-identical on any number of workers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

from shardwise.comm import Collectives
from shardwise.config import Settings, flag
from shardwise.engine.step_statistics import Aggregation, Number
from shardwise.errors import ConfigError, UsageError
from shardwise.layout.sum_tree import MicroShards
from shardwise.messages.printable import many
from shardwise.states.storage import squared_sums
from shardwise.world.randomness import seed_from

_WITHOUT = {
    "micro_batch_size": "the micro-shards are the micro-batches",
    "micro_batch_tokens": "the micro-shards are the micro-batches",
    "sync_batch_norm": "statistics over all workers would depend on their number; without it each "
    "micro-shard has its own statistics",
}


def check(settings: Settings, group: Collectives) -> None:
    """Raise ConfigError if exact mode cannot be combined with another setting or this `group`."""
    if settings.exact is None:
        return
    for name, why in _WITHOUT.items():
        if getattr(settings, name):
            raise ConfigError(
                f"--exact {settings.exact} cannot be combined with {flag(name)}: {why}. "
                "Remove one of the two."
            )
    if settings.shard_within == "host":
        raise ConfigError(
            f"--exact {settings.exact} sums over all workers in one tree, but --shard-within host "
            "would cut the tree at the hosts. Write --shard-within all."
        )
    # Each host sums its own ranks first, so the ranks of a host must be a subtree of the full tree.
    if not group.knows_tree:
        raise ConfigError(
            f"--exact {settings.exact} sums in a binary tree, and the ranks of each host must be "
            "one subtree: start a power of two of ranks on each host, numbered host by host, or "
            "write --transport gloo."
        )
    MicroShards(settings.exact, group.size, group.rank)  # raises if they do not divide


class ExactAggregation(Aggregation):
    """Adds up the ranks' reports in exact mode, with a single rounding at the end.

    Ranks report one number per micro-shard.
    """

    def __init__(self, shards: MicroShards) -> None:
        super().__init__(shards.rank)
        self._shards = shards

    def follow(self, rank: int, workers: int) -> None:
        self._shards = replace(self._shards, workers=workers, rank=rank)

    def seed(self, seed: int, engine: int, step: int, backwards: int) -> int | None:
        """Return the next micro-shard's seed, which does not depend on the number of ranks."""
        number = self._shards.number(backwards)
        return seed_from(seed, "micro-shard", engine, step, number)

    def first_step(self, weights: Sequence[float]) -> tuple[float, int]:
        """Estimate the first step's total weight and number of backward passes.

        Uses only the first micro-shard, which is on rank 0 for any number of ranks.
        """
        return weights[0] * self._shards.count, self._shards.count

    def check(self, backwards: int) -> None:
        shards = self._shards
        if backwards != shards.turns:
            raise UsageError(
                f"--exact {shards.count} on {many(shards.workers, 'worker')} needs "
                f"{many(shards.turns, 'backward')} per worker and step, but this step had "
                f"{backwards}. Write `for step in loader.steps():`, in it `for x, y in step: "
                "engine.backward(...)`, then engine.step() once."
            )

    def report(self, values: Sequence[Number]) -> list[Number]:
        # Report one number per micro-shard, so that `total` can round once over all of them.
        return list(values)

    def total(self, rows: Sequence[Sequence[float]]) -> float:
        values = [value for row in rows for value in row]
        # fsum is exact in any order. It raises for infinities of both signs; `sum` returns their
        # NaN.
        return math.fsum(values) if all(map(math.isfinite, values)) else sum(values)

    def total_of_squares(self, rows: Sequence[Sequence[float]]) -> float:
        return squared_sums.exact_total(rows)

    def refuse_late(self, names: Sequence[str], group: Collectives) -> None:
        several = itertools.chain.from_iterable(group.gather_objects(list(names)))
        # Raise the same message on every rank, even if only one has late gradients.
        first, *more = dict.fromkeys(several) or ["a parameter"]
        raise UsageError(
            f"--exact {self._shards.count}: the gradient of {first}"
            f"{f' and {len(more)} more' if more else ''} was not expected: it did not arrive in "
            "earlier steps, or it arrived twice (reentrant checkpointing). A sum started without "
            "all of its gradients, so results would depend on the number of workers. Write "
            "--no-overlap: sums then start when backward has ended."
        )
