"""Selects the step hooks of an engine whose ranks form islands, and checks its settings.

ParameterAveraging    islands update separately, and average parameters every H steps
BoundedStaleness      all islands apply the same updates, from gradients that are S steps old
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
    """Return an engine's step hooks, or None if all of its ranks form a single island."""
    # An elastic island needs hooks even if it is currently the only one, because others may return.
    if peers.size == 1 and not peers.has_changing_ranks:
        return None
    kind = ParameterAveraging if settings.behind is None else BoundedStaleness
    return kind(settings, world_group, step_group, peers, shard_group)


_WITHOUT: dict[str, tuple[Callable[[Settings], bool], str]] = {
    "--sync-batch-norm": (
        lambda settings: settings.sync_batch_norm,
        "batch statistics would differ between islands",
    ),
    "--ema-decay": (
        lambda settings: settings.ema_decay is not None and settings.behind is None,
        "the anchor is already the average over islands, and each island would keep another one",
    ),
    "--shard-within host": (
        lambda settings: settings.shard_within == "host" and settings.placement.level > 0,
        "an island shards over all of its workers; --islands host makes each host an island",
    ),
}


def check(settings: Settings, *, elastic: bool) -> None:
    """Raise ConfigError if a setting cannot be combined with islands.

    If `elastic` is true, also raise it for settings that elastic islands do not support.
    """
    check_contradictions(settings)
    settings.averaging_rule  # noqa: B018 (raises for values that do not fit together)
    for flag, (is_on, why) in _WITHOUT.items():
        if is_on(settings):
            raise ConfigError(
                f"--islands {settings.islands} cannot be combined with {flag}: {why}. Remove one "
                "of them."
            )
    if not elastic:
        return
    for flag, value in (("--late", settings.late or None), ("--behind", settings.behind)):
        if value is not None:
            raise ConfigError(DELAYS.format(flag=f"{flag} {value}"))
