"""Settings that would change nothing, refused: who gave them meant them to. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shardwise.config.settings import FIELDS, Settings, flag
from shardwise.config.sources import FLAG, SCRIPT, Source
from shardwise.errors import ConfigError


@dataclass(frozen=True)
class Need:
    """The setting `name` has an effect only where `holds`, which is up to the settings `by`."""

    name: str
    holds: Callable[[Settings], bool]
    by: tuple[str, ...]
    words: str


def _is_split(settings: Settings) -> bool:
    return settings.tensor > 1


def _is_shared_out(settings: Settings) -> bool:
    return settings.pipeline > 1


def _is_sharded(settings: Settings) -> bool:
    return settings.placement.level > 0


def _is_said_in_time(settings: Settings) -> bool:
    return settings.warn_after < settings.timeout


_PIPELINE = "without --pipeline P, the workers that share out the layers"
NEEDS = (
    Need("sequence_parallel", _is_split, ("tensor",), "without --tensor T"),
    Need("schedule", _is_shared_out, ("pipeline",), _PIPELINE),
    Need("stages", _is_shared_out, ("pipeline",), _PIPELINE),
    Need("shard_within", _is_sharded, ("zero", "shard"), "where nothing is sharded (--zero 0)"),
    Need("warn_after", _is_said_in_time, ("timeout",), "unless it is less than --timeout"),
)


def refuse_idle(found: Sequence[Source], settings: Settings) -> None:
    """Raise ConfigError for one of `settings`, which come from `found` (strongest first), that
    changes nothing.

    What a script says may have no effect in one of its runs, and what a stronger source takes the
    effect from is overridden.
    """
    for need in NEEDS:
        value = getattr(settings, need.name)
        if value == FIELDS[need.name].default or need.holds(settings):
            continue
        given, taken = _first(found, (need.name,)), _first(found, need.by)
        if given is not None and (taken is None or given <= taken):
            raise ConfigError(_words(need, value, found[given].name))


def _first(found: Sequence[Source], names: Sequence[str]) -> int | None:
    """The strongest source that gives one of `names`, other than the script."""
    for number, source in enumerate(found):
        if source.name != SCRIPT and any(source.values.get(n) is not None for n in names):
            return number
    return None


def _words(need: Need, value: object, source: str) -> str:
    said = ",".join(value) if isinstance(value, tuple) else value
    given = flag(need.name) if value is True else f"{flag(need.name)} {said}"
    where = "" if source == FLAG else f" ({source})"
    return f"{given}{where} has no effect {need.words}: leave it out, or give both."
