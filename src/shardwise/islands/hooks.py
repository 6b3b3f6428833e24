"""Chooses the hooks of an engine whose ranks form several islands, and checks its settings.

ParameterAveraging    each island makes its own updates; every H steps they average parameters
BoundedStaleness      all islands make the same updates, from gradients that are S steps old
"""

from __future__ import annotations

from collections.abc import Callable

from shardwise.comm import Collectives
from shardwise.config import Settings, check_contradictions
from shardwise.errors import ConfigError
from shardwise.islands.bounded_staleness import BoundedStaleness
from shardwise.islands.elastic.membership import DELAYS
from shardwise.islands.parameter_averaging import ParameterAveraging
from shardwise.states.step_hooks import StepHooks


def hooks_for(
    settings: Settings,
    world_group: Collectives,
    step_group: Collectives,
    peers: Collectives,
    shard_group: Collectives,
) -> StepHooks | None:
    """Return the hooks of an engine, None if all of its ranks are one island."""
    # An elastic island has hooks even while it is alone: others may come back.
    if peers.size == 1 and not peers.comes_and_goes:
        return None
    kind = ParameterAveraging if settings.behind is None else BoundedStaleness
    return kind(settings, world_group, step_group, peers, shard_group)


_WITHOUT: dict[str, tuple[Callable[[Settings], bool], str]] = {
    "--sync-batch-norm": (
        lambda settings: settings.sync_batch_norm,
        "its statistics would stay those of each island",
    ),
    "--ema-decay": (
        lambda settings: settings.ema_decay is not None and settings.behind is None,
        "the anchor is the average that islands have, and another one of each would be its own",
    ),
    "--shard-within host": (
        lambda settings: settings.shard_within == "host" and settings.placement.level > 0,
        "an island shards over all of its workers; --islands host makes each host one",
    ),
}


def check(settings: Settings, *, elastic: bool) -> None:
    """Raise ConfigError for a setting that does not work with several islands, or with `elastic`
    ones."""
    check_contradictions(settings)
    settings.averaging_rule  # noqa: B018 (raises for numbers that do not fit each other)
    for given, (is_on, why) in _WITHOUT.items():
        if is_on(settings):
            raise ConfigError(
                f"--islands {settings.islands} and {given} cannot be had together: {why}. Leave "
                "one of them out."
            )
    if not elastic:
        return
    for given, value in (("--late", settings.late or None), ("--behind", settings.behind)):
        if value is not None:
            raise ConfigError(DELAYS.format(given=f"{given} {value}"))
