"""Finds settings that have no effect: an error where a flag gave one, else a line. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from shardwise.config.settings import FIELDS, Settings, flag
from shardwise.config.sources import FLAG, OF_THE_ENGINE, SCRIPT, SettingsSource, as_given
from shardwise.errors import ConfigError


@dataclass(frozen=True)
class Need:
    """The setting `name` has an effect only where `holds`, which is up to the settings `by`.

    `where` says in words where it has none, `give` what it needs.
    """

    name: str
    holds: Callable[[Settings], bool]
    by: tuple[str, ...]
    where: str
    give: str


def _is_split(settings: Settings) -> bool:
    return settings.tensor > 1


def _is_shared_out(settings: Settings) -> bool:
    return settings.pipeline > 1


def _is_sharded(settings: Settings) -> bool:
    return settings.placement.level > 0


def _has_islands(settings: Settings) -> bool:
    return settings.islands != 1


_ISLANDS = ("without --islands N, the number of groups with steps of their own", "--islands N")
_PIPELINE = ("without --pipeline P, the number of pipeline stages", "--pipeline P")
_ALL = (
    Need("sequence_parallel", _is_split, ("tensor",), "without --tensor T", "--tensor T"),
    Need("schedule", _is_shared_out, ("pipeline",), *_PIPELINE),
    Need("stages", _is_shared_out, ("pipeline",), *_PIPELINE),
    Need("equal_every", _has_islands, ("islands",), *_ISLANDS),
    Need("outer", _has_islands, ("islands",), *_ISLANDS),
    Need("wire", _has_islands, ("islands",), *_ISLANDS),
    Need("late", _has_islands, ("islands",), *_ISLANDS),
    Need("behind", _has_islands, ("islands",), *_ISLANDS),
    Need(
        "shard_within",
        _is_sharded,
        ("zero", "shard"),
        "where nothing is sharded (--zero 0)",
        "--zero 1, 2 or 3",
    ),
)

OF_A_RUN = tuple(need for need in _ALL if not OF_THE_ENGINE & set(need.by))
"""What is known as soon as `sw.init` has its keywords."""

OF_AN_ENGINE = tuple(need for need in _ALL if OF_THE_ENGINE & set(need.by))
"""What keywords of `sw.Engine` may still give an effect to."""


def idle(found: Sequence[SettingsSource], settings: Settings, needs: Collection[Need]) -> list[str]:
    """A line for each of `settings`, which come from `found` (strongest first), that lacks what it
    `needs` here. Raises ConfigError where that is a flag.

    Environments and files are shared by runs, so there it is a line. What a script says may have no
    effect in one of its runs, and what a stronger source takes the effect from is overridden.
    """
    lines = []
    for need in needs:
        value = getattr(settings, need.name)
        if value == FIELDS[need.name].default or need.holds(settings):
            continue
        given, taken = _first(found, (need.name,)), _first(found, need.by)
        if given is None or (taken is not None and taken < given):
            continue
        source = found[given].name
        # The script itself may take the effect away, perhaps for one engine of several: then the
        # flag is not a mistake.
        script = found[-1].values
        by_script = taken is None and any(script.get(name) is not None for name in need.by)
        if source == FLAG and not by_script:
            said = ",".join(value) if isinstance(value, tuple) else value
            words = flag(need.name) if value is True else f"{flag(need.name)} {said}"
            raise ConfigError(
                f"{words} has no effect {need.where}: leave it out, or give {need.give}."
            )
        lines.append(f"{as_given(need.name, value, source)} has no effect here, {need.where}.")
    return lines


def _first(found: Sequence[SettingsSource], names: Sequence[str]) -> int | None:
    """The strongest source that gives one of `names`, other than the script."""
    for number, source in enumerate(found):
        if source.name != SCRIPT and any(source.values.get(n) is not None for n in names):
            return number
    return None
