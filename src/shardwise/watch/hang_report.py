"""Words the warning about a long wait: which ranks wait, which are missing, where each is. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from shardwise.watch.wait_graph import RankStatus, Statuses, named

T = TypeVar("T")

_OF_A_STEP = {"forward", "engine.backward", "engine.step"}

Answered = Mapping[int, RankStatus]
"""The ranks that have given their status."""


def wait_warning(statuses: Statuses, timeout: float) -> str:
    """Build the warning from the status of all ranks; "" where nobody waits any more.

    The wait ends after `timeout` seconds.
    """
    answered = _answered(statuses)
    waiting = {rank: one for rank, one in answered.items() if one.call}
    if not waiting:
        return ""
    longest = max(one.seconds for one in waiting.values())
    awaited = {rank for one in waiting.values() for rank in one.missing}
    # Ranks that do not wait themselves are to blame. If all wait, for each other, all are named.
    missing = sorted({rank for rank in awaited if rank not in waiting} or awaited)
    steps = [one.step for one in answered.values() if one.step is not None]
    in_step = f" in step {max(steps) + 1}" if steps else ""
    have = "have" if len(waiting) > 1 else "has"
    by_words = {
        rank: one if isinstance(one, str) else one.activity for rank, one in statuses.items()
    }
    stacks = {rank: one.stack for rank, one in answered.items() if one.stack}
    lines = [
        f"shardwise: {named(waiting)} {have} waited {longest:.0f} s{in_step} for "
        f"{named(missing)}. The run ends after {timeout:g} s (--timeout).",
        *filter(None, [call_difference(statuses)]),
        *(_line(said, ranks) for said, ranks in _grouped(by_words)),
    ]
    for stack, ranks in _grouped(stacks):
        lines += [f"  stack of {named(ranks)}, innermost last:", *(f"    {one}" for one in stack)]
    return "\n".join(lines) + "\n"


def call_difference(statuses: Statuses) -> str:
    """Say in plain words that ranks are in different calls of this library; "" where not."""
    answered = _answered(statuses)
    groups = _grouped({rank: one.place for rank, one in answered.items() if one.verb and one.line})
    if len(groups) < 2:
        return ""
    said = ", ".join(f"{named(ranks)} {_are(ranks)} {place}" for place, ranks in groups)
    said = f"{said[0].upper()}{said[1:]}"
    verbs = {one.verb for one in answered.values() if one.verb and one.line}
    if "forward" in verbs and verbs <= _OF_A_STEP:
        return (
            f"{said}: do some run a forward that others leave out, by a number that each has drawn "
            "for itself or has of its own rows? Draw it with world.alike(), decide it by "
            "world.any(flag), or write: with engine.uneven()."
        )
    block = "`if is_main`" if groups[0][1] == [0] else "an `if`"
    return f"{said}: is the call under {block}?"


def _line(said: str, ranks: Sequence[int]) -> str:
    are = "" if said.startswith(("is ", "does ")) else f"{_are(ranks)} "
    return f"  {named(ranks)} {are}{said}"


def _answered(statuses: Statuses) -> Answered:
    return {rank: one for rank, one in statuses.items() if isinstance(one, RankStatus)}


def _grouped(said: Mapping[int, T]) -> list[tuple[T, list[int]]]:
    """Group the ranks that say the same, in the order of their first."""
    groups: dict[T, list[int]] = {}
    for rank in sorted(said):
        groups.setdefault(said[rank], []).append(rank)
    return list(groups.items())


def _are(ranks: Sequence[int]) -> str:
    return "are" if len(ranks) > 1 else "is"
