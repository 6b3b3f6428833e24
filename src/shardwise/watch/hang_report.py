"""Builds the warning about a long wait: which ranks wait, which are missing, and where each is.

It does not communicate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from shardwise.watch.wait_graph import RankStatus, Statuses, named

T = TypeVar("T")

_OF_A_STEP = {"forward", "engine.backward", "engine.step"}

Answered = Mapping[int, RankStatus]
"""Maps each rank that has answered to its status."""


def wait_warning(statuses: Statuses, timeout: float) -> str:
    """Build the warning from all ranks' statuses. Return "" if no rank is waiting any more.

    `timeout` is the number of seconds after which the wait fails.
    """
    answered = _answered(statuses)
    waiting = {rank: one for rank, one in answered.items() if one.call}
    if not waiting:
        return ""
    longest = max(one.seconds for one in waiting.values())
    awaited = {rank for one in waiting.values() for rank in one.missing}
    # Name the ranks that are not waiting themselves. If all wait for each other, name all of them.
    missing = sorted({rank for rank in awaited if rank not in waiting} or awaited)
    # Use the latest step of any rank. A rank that hangs in an earlier step is shown by its line.
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
    ]
    for words, ranks in _grouped(by_words):
        # For a rank that does not answer, `words` already includes a verb: "does not answer", "is
        # stopped".
        verb = "" if words.startswith(("is ", "does ")) else f"{_are(ranks)} "
        lines.append(f"  {named(ranks)} {verb}{words}")
    for stack, ranks in _grouped(stacks):
        lines += [f"  stack of {named(ranks)}, innermost last:", *(f"    {one}" for one in stack)]
    return "\n".join(lines) + "\n"


def call_difference(statuses: Statuses) -> str:
    """Describe which ranks are in different library calls. Return "" if all are in the same one."""
    answered = _answered(statuses)
    groups = _grouped({rank: one.place for rank, one in answered.items() if one.verb and one.line})
    # If all ranks are at the same line, the cause is not a missing call.
    if len(groups) < 2:
        return ""
    places = ", ".join(f"{named(ranks)} {_are(ranks)} {place}" for place, ranks in groups)
    places = f"{places[0].upper()}{places[1:]}"
    verbs = {one.verb for one in answered.values() if one.verb and one.line}
    if "forward" in verbs and verbs <= _OF_A_STEP:
        return (
            f"{places}: do some ranks skip a forward, because of a random number or of their rows? "
            "Draw the number with world.alike(), decide with world.any(flag), or write: "
            "with engine.uneven()."
        )
    # If only rank 0 is elsewhere, the usual cause is a save or a print under `if is_main`.
    block = "`if is_main`" if groups[0][1] == [0] else "an `if`"
    return f"{places}: is the call under {block}?"


def _answered(statuses: Statuses) -> Answered:
    return {rank: one for rank, one in statuses.items() if isinstance(one, RankStatus)}


def _grouped(values: Mapping[int, T]) -> list[tuple[T, list[int]]]:
    """Group ranks by value. The groups are ordered by their first rank."""
    groups: dict[T, list[int]] = {}
    for rank in sorted(values):
        groups.setdefault(values[rank], []).append(rank)
    return list(groups.items())


def _are(ranks: Sequence[int]) -> str:
    return "are" if len(ranks) > 1 else "is"
