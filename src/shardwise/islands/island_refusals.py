"""Refuses settings that cannot be had where islands make steps of their own. Pure."""

from __future__ import annotations

from collections.abc import Callable

from shardwise.config import BESIDE_ELASTIC, Settings, check_islands
from shardwise.errors import ConfigError

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
    """Raise ConfigError for a setting that cannot be had beside several islands, or `elastic`
    ones."""
    check_islands(settings)
    settings.island_rule  # noqa: B018 (raises for numbers that do not fit each other)
    for given, (is_on, why) in _WITHOUT.items():
        if is_on(settings):
            raise ConfigError(
                f"--islands {settings.islands} and {given} cannot be had together: {why}. Leave "
                "one of them out."
            )
    if elastic:
        _check_elastic(settings)


def _check_elastic(settings: Settings) -> None:
    for given, value in (("--late", settings.late or None), ("--behind", settings.behind)):
        if value is not None:
            raise ConfigError(BESIDE_ELASTIC.format(given=f"{given} {value}"))
