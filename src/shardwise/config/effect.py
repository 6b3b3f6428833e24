"""Detects settings that have no effect.

It is an error if a flag has no effect. For any other setting, there is only a warning. The
functions of this module are pure.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from shardwise.config.settings import FIELDS, Settings, flag
from shardwise.config.sources import FLAG, OF_THE_ENGINE, SCRIPT, SettingsSource, as_given
from shardwise.errors import ConfigError


@dataclass(frozen=True)
class Need:
    """A condition under which a setting has an effect.

    Args:
        name: The setting.
        holds: Function that returns whether the condition holds.
        by: The settings that the condition depends on.
        where: Text for the message, which says when the setting has no effect.
        give: Text for the message, which names the missing flag.
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


def _has_guard(settings: Settings) -> bool:
    return settings.guard is not None


_GUARD = ("without --guard K, the number of steps between two checks", "--guard K")
_ISLANDS = ("without --islands N, the number of groups that step on their own", "--islands N")
_PIPELINE = ("without --pipeline P, the number of pipeline stages", "--pipeline P")
_ALL = (
    Need(
        "spares",
        lambda settings: settings.survive > 0,
        ("survive",),
        "without --survive K",
        "--survive K",
    ),
    Need(
        "sequence_parallel",
        lambda settings: settings.tensor > 1,
        ("tensor",),
        "without --tensor T",
        "--tensor T",
    ),
    Need(
        "context_method",
        lambda settings: settings.context > 1,
        ("context",),
        "without --context C",
        "--context C",
    ),
    Need("schedule", _has_stages, ("pipeline",), *_PIPELINE),
    Need("stages", _has_stages, ("pipeline",), *_PIPELINE),
    Need("equal_every", _has_islands, ("islands",), *_ISLANDS),
    Need("outer", _has_islands, ("islands",), *_ISLANDS),
    Need("wire", _has_islands, ("islands",), *_ISLANDS),
    Need("late", _has_islands, ("islands",), *_ISLANDS),
    Need("behind", _has_islands, ("islands",), *_ISLANDS),
    Need("guard_action", _has_guard, ("guard",), *_GUARD),
    Need("guard_spikes", _has_guard, ("guard",), *_GUARD),
    Need("guard_memory", _has_guard, ("guard",), *_GUARD),
    Need(
        "shard_within",
        lambda settings: settings.placement.level > 0,
        ("zero", "shard"),
        "when nothing is sharded (--zero 0)",
        "--zero 1, 2 or 3",
    ),
)

OF_A_RUN = tuple(need for need in _ALL if not OF_THE_ENGINE & set(need.by))
"""Conditions that can be tested in `sw.init`."""

OF_AN_ENGINE = tuple(need for need in _ALL if OF_THE_ENGINE & set(need.by))
"""Conditions that keyword arguments of `sw.Engine` may still fulfil."""


def idle(found: Sequence[SettingsSource], settings: Settings, needs: Collection[Need]) -> list[str]:
    """Return a warning for each setting whose condition in `needs` does not hold.

    Args:
        found: The sources of `settings`, strongest first.
        settings: The merged settings.
        needs: The conditions to test.

    Raises:
        ConfigError: A setting that has no effect was passed as a flag.
    """
    # Only a flag is an error, because it was typed for this run. Environment variables and files
    # may be shared by several runs, so an idle setting there only causes a warning. A script's
    # keyword may be idle in some of its runs, and a stronger source may override the setting that
    # it needs. Neither deserves a message.
    lines = []
    for need in needs:
        value = getattr(settings, need.name)
        # A setting that equals its default changes nothing, so there is no reason to warn.
        if value == FIELDS[need.name].default or need.holds(settings):
            continue
        # `given` and `taken` are indices of sources. A smaller index is a stronger source.
        given, taken = _first(found, (need.name,)), _first(found, need.by)
        if given is None or (taken is not None and taken < given):
            continue
        source = found[given].name
        # If the script itself sets the required setting, perhaps only for one of several engines,
        # the flag is not a mistake.
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
    """Return the index of the strongest source, excluding the script, that sets one of `names`."""
    for number, source in enumerate(found):
        if source.name != SCRIPT and any(source.values.get(n) is not None for n in names):
            return number
    return None
