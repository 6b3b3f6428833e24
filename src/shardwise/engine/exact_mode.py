"""The exact mode gives the same bits on any number of workers: what it refuses, and how it adds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from shardwise.comm import Collectives
from shardwise.config import Settings, flag
from shardwise.engine.step_statistics import Aggregation, Number
from shardwise.errors import ConfigError, UsageError
from shardwise.layout.sum_tree import MicroShards
from shardwise.states.storage import squared_sums
from shardwise.world.randomness import seed_from

_WITHOUT = {
    "micro_batch_size": "the micro-shards are the micro-batches",
    "sync_batch_norm": "statistics over all workers would be of as many micro-shards as there are "
    "workers; without it each micro-shard has its own, alike on any number of workers",
}


def shards_of(settings: Settings, group: Collectives) -> MicroShards | None:
    """The micro-shards of a step; None where the exact mode is off.

    Raises ConfigError for settings that cannot be had with it, and for a number of workers that
    cannot give the bits of the others.
    """
    if settings.exact is None:
        return None
    for name, why in _WITHOUT.items():
        if getattr(settings, name):
            raise ConfigError(
                f"--exact {settings.exact} and {flag(name)} cannot be had together: {why}. "
                "Leave one of them out."
            )
    if settings.shard_within == "host":
        raise ConfigError(
            f"--exact {settings.exact} sums over all workers in one tree, which --shard-within "
            "host would cut at the hosts. Write --shard-within all."
        )
    if not group.knows_tree:
        raise ConfigError(
            f"--exact {settings.exact} sums in a tree of which these hosts' ranks are no nodes: "
            "start a power of two of ranks on each, numbered host by host, or write "
            "--transport gloo."
        )
    return MicroShards(settings.exact, group.size, group.rank)


class ExactAggregation(Aggregation):
    """Adds up in the exact mode: one backward for each micro-shard is reported by itself, and sums
    are rounded once."""

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

    def reported(self, values: Sequence[Number]) -> list[Number]:
        return list(values)

    def total(self, rows: Sequence[Sequence[float]]) -> float:
        values = [value for row in rows for value in row]
        # fsum, exact in any order, raises where infinities meet; addition gives the NaN they make.
        return math.fsum(values) if all(map(math.isfinite, values)) else sum(values)

    def total_of_squares(self, rows: Sequence[Sequence[float]]) -> float:
        return squared_sums.exact_total(rows)

    def refuse_late(self, names: Sequence[str], group: Collectives) -> None:
        several = itertools.chain.from_iterable(group.gather_objects(list(names)))
        first, *more = dict.fromkeys(several) or ["a parameter"]
        raise UsageError(
            f"--exact {self._shards.count}: the gradient of {first}"
            f"{f' and {len(more)} more' if more else ''} was not expected, because it did not come "
            "in earlier steps, or it came twice (reentrant checkpointing). So a sum began without "
            "all of its gradients, and results would depend on the number of workers. "
            "--no-overlap lets sums begin when backward has ended."
        )
