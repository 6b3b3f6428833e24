"""What is said of ranks that wait for long: who waits, who is missing, where each is. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from shardwise.watch.wait_graph import Seen, Whereabouts, named

T = TypeVar("T")

_OF_A_STEP = {"forward", "engine.backward", "engine.step"}

Heard = Mapping[int, Whereabouts]


def words(seen: Seen, timeout: float) -> str:
    """The warning about a wait of all ranks `seen`, which ends after `timeout` seconds; "" where
    nobody waits any more."""
    heard = _heard(seen)
    waiting = {rank: one for rank, one in heard.items() if one.call}
    if not waiting:
        return ""
    longest = max(one.seconds for one in waiting.values())
    have = "have" if len(waiting) > 1 else "has"
    lines = [
        f"shardwise: {named(waiting)} {have} waited {longest:.0f} s{_step(heard)} for "
        f"{named(_missing(seen, waiting))}. The run ends after {timeout:g} s (--timeout).",
        *filter(None, [difference(seen)]),
        *(_line(said, ranks) for said, ranks in _grouped({r: _said(o) for r, o in seen.items()})),
    ]
    for stack, ranks in _grouped({rank: one.stack for rank, one in heard.items() if one.stack}):
        lines += [f"  stack of {named(ranks)}, innermost last:", *(f"    {one}" for one in stack)]
    return "\n".join(lines) + "\n"


def difference(seen: Seen) -> str:
    """In plain words that ranks are in different calls of ours; "" where they are not."""
    heard = _heard(seen)
    groups = _grouped({rank: one.place for rank, one in heard.items() if one.verb and one.line})
    if len(groups) < 2:
        return ""
    said = ", ".join(f"{named(ranks)} {_are(ranks)} {place}" for place, ranks in groups)
    said = f"{said[0].upper()}{said[1:]}"
    verbs = {one.verb for one in heard.values() if one.verb and one.line}
    if "forward" in verbs and verbs <= _OF_A_STEP:
        return (
            f"{said}: do some run a forward that others leave out, by a number that each has drawn "
            "for itself or has of its own rows? Draw it with world.alike(), decide it by "
            "world.any(flag), or write: with engine.uneven()."
        )
    block = "`if is_main`" if groups[0][1] == [0] else "an `if`"
    return f"{said}: is the call under {block}?"


def _missing(seen: Seen, waiting: Heard) -> list[int]:
    """Those that are waited for and do not wait themselves; where all wait, all of these."""
    awaited = {rank for one in waiting.values() for rank in one.missing}
    return sorted({rank for rank in awaited if rank not in waiting} or awaited)


def _line(said: str, ranks: Sequence[int]) -> str:
    are = "" if said.startswith(("is ", "does ")) else f"{_are(ranks)} "
    return f"  {named(ranks)} {are}{said}"


def _said(one: Whereabouts | str) -> str:
    return one if isinstance(one, str) else one.said


def _heard(seen: Seen) -> Heard:
    return {rank: one for rank, one in seen.items() if isinstance(one, Whereabouts)}


def _grouped(said: Mapping[int, T]) -> list[tuple[T, list[int]]]:
    """Ranks that say the same, together, in the order of their first."""
    groups: dict[T, list[int]] = {}
    for rank in sorted(said):
        groups.setdefault(said[rank], []).append(rank)
    return list(groups.items())


def _are(ranks: Sequence[int]) -> str:
    return "are" if len(ranks) > 1 else "is"


def _step(heard: Heard) -> str:
    made = [one.step for one in heard.values() if one.step is not None]
    return f" in step {max(made) + 1}" if made else ""
