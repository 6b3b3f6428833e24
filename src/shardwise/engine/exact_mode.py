"""The exact mode: what it needs, and what cannot be had with it."""

from __future__ import annotations

from shardwise.collectives import Collectives
from shardwise.config import Settings, flag
from shardwise.errors import ConfigError
from shardwise.sum_tree import MicroShards

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
