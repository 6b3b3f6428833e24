"""Finds settings that have no effect. Raises an error if a flag set one, else warns. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from shardwise.config.settings import FIELDS, Settings, flag
from shardwise.config.sources import FLAG, OF_THE_ENGINE, SCRIPT, SettingsSource, as_given
from shardwise.errors import ConfigError


@dataclass(frozen=True)
class Need:
    """A condition under which the setting `name` has an effect.

    `holds` tests the condition, which depends on the settings `by`. For the message, `where`
    describes when the setting has no effect, and `give` names the flag that it needs.
    """

    name: str
    holds: Callable[[Settings], bool]
    by: tuple[str, ...]
    where: str
    give: str


def _has_stages(settings: Settings) -> bool:
    return settings.pipeline > 1


def _has_islands(settings: Settings) -> bool:
    return settings.islands != 1


_ISLANDS = ("without --islands N, the number of groups that step on their own", "--islands N")
_PIPELINE = ("without --pipeline P, the number of pipeline stages", "--pipeline P")
_ALL = (
    Need(
        "sequence_parallel",
        lambda settings: settings.tensor > 1,
        ("tensor",),
        "without --tensor T",
        "--tensor T",
    ),
    Need("schedule", _has_stages, ("pipeline",), *_PIPELINE),
    Need("stages", _has_stages, ("pipeline",), *_PIPELINE),
    Need("equal_every", _has_islands, ("islands",), *_ISLANDS),
    Need("outer", _has_islands, ("islands",), *_ISLANDS),
    Need("wire", _has_islands, ("islands",), *_ISLANDS),
    Need("late", _has_islands, ("islands",), *_ISLANDS),
    Need("behind", _has_islands, ("islands",), *_ISLANDS),
    Need(
        "shard_within",
        lambda settings: settings.placement.level > 0,
        ("zero", "shard"),
        "when nothing is sharded (--zero 0)",
        "--zero 1, 2 or 3",
    ),
)

OF_A_RUN = tuple(need for need in _ALL if not OF_THE_ENGINE & set(need.by))
"""Conditions that can be tested as soon as `sw.init` has its keywords."""

OF_AN_ENGINE = tuple(need for need in _ALL if OF_THE_ENGINE & set(need.by))
"""Conditions that keywords of `sw.Engine` may still fulfil."""


def idle(found: Sequence[SettingsSource], settings: Settings, needs: Collection[Need]) -> list[str]:
    """Return a warning for each setting whose condition in `needs` does not hold.

    `found` are the sources of `settings`, strongest first.
    Raises ConfigError if the idle setting was given as a flag.
    """
    # Only a flag is an error: it was typed for this run. Environment variables and files are shared
    # by several runs, so an idle setting there gets a warning. A script's keyword may be idle in
    # one of its runs, and a stronger source may override the setting that it needs: neither is
    # worth a word.
    lines = []
    for need in needs:
        value = getattr(settings, need.name)
        if value == FIELDS[need.name].default or need.holds(settings):
            continue
        # `given` and `taken` are indices of sources: the smaller one is the stronger source.
        given, taken = _first(found, (need.name,)), _first(found, need.by)
        if given is None or (taken is not None and taken < given):
            continue
        source = found[given].name
        # If the script itself sets the setting that is needed, perhaps only for one engine of
        # several, then the flag is not a mistake.
        script = found[-1].values
        by_script = taken is None and any(script.get(name) is not None for name in need.by)
        if source == FLAG and not by_script:
            said = ",".join(value) if isinstance(value, tuple) else value
            words = flag(need.name) if value is True else f"{flag(need.name)} {said}"
            raise ConfigError(
                f"{words} has no effect {need.where}: leave it out, or add {need.give}."
            )
        lines.append(f"{as_given(need.name, value, source)} has no effect here, {need.where}.")
    return lines


def _first(found: Sequence[SettingsSource], names: Sequence[str]) -> int | None:
    """Return the index of the strongest source that sets one of `names`, except the script."""
    for number, source in enumerate(found):
        if source.name != SCRIPT and any(source.values.get(n) is not None for n in names):
            return number
    return None
