"""From a rank that waits to those that it waits for in the end. Pure but for what it asks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Told:
    """Why rank `rank` gave up; `lost` where another one had ended."""

    rank: int
    text: str
    lost: bool


@dataclass(frozen=True, kw_only=True)
class Whereabouts:
    """What a rank says of itself.

    `call` is the collective that it waits in for the ranks `missing`, for `seconds`; "" where it
    waits in none. `verb` and `line` say where in the user's code it is.
    """

    rank: int
    call: str = ""
    missing: tuple[int, ...] = ()
    seconds: float = 0.0
    verb: str = ""
    line: str = ""
    step: int | None = None
    told: Told | None = None
    stack: tuple[str, ...] = ()

    @property
    def place(self) -> str:
        """In words: "in engine.save (train.py:88)"."""
        if self.verb and self.line:
            return f"in {self.verb} ({self.line})"
        return f"in {self.verb}" if self.verb else f"at {self.line}" if self.line else "at its end"

    @property
    def said(self) -> str:
        """What it does, in words that go on from "is"."""
        if not self.call:
            return f"in no collective, {self.place}"
        return f"{self.place}: {self.call}, for {named(self.missing)}"


Seen = Mapping[int, Whereabouts | str]
"""By rank what it says, or in words why it says nothing."""

Ask = Callable[[Collection[int]], Seen]


@dataclass(frozen=True, kw_only=True)
class Roots:
    """`ranks` are waited for and wait for nobody; where all wait in a circle, `circle` is true
    and they are all of it. `told` is what one on the way has given up for."""

    ranks: tuple[int, ...]
    seen: Seen
    told: Told | None = None
    circle: bool = False


def follow(asker: int, missing: Collection[int], ask: Ask) -> Roots:
    """Ask who waits for whom, from the ranks that `asker` misses on."""
    seen: dict[int, Whereabouts | str] = {}
    found: set[int] = set()
    next_ones = set(missing) - {asker}
    while next_ones:
        answers = ask(sorted(next_ones))
        seen.update(answers)
        further: set[int] = set()
        for rank, answer in answers.items():
            if isinstance(answer, str) or not answer.missing:
                found.add(rank)
            else:
                further.update(answer.missing)
            if isinstance(answer, Whereabouts) and answer.told is not None:
                return Roots(ranks=(rank,), seen=seen, told=answer.told)
        next_ones = further - seen.keys() - {asker}
    circle = not found
    return Roots(ranks=tuple(sorted(found or seen)), seen=seen, circle=circle)


def named(ranks: Iterable[int]) -> str:
    """ "rank 2", "ranks 0, 2", or "ranks 0, 2-5"."""
    listed = sorted(ranks)
    rows: list[list[int]] = []
    for rank in listed:
        if rows and rank == rows[-1][-1] + 1:
            rows[-1].append(rank)
        else:
            rows.append([rank])
    return f"rank{'s' if len(listed) > 1 else ''} {', '.join(map(_row, rows))}"


def _row(row: Sequence[int]) -> str:
    return f"{row[0]}-{row[-1]}" if len(row) > 2 else ", ".join(map(str, row))


def words(missing: Collection[int], roots: Roots) -> str:
    """What is said of the ranks that did not come."""
    whom = named(missing)
    if roots.circle or set(roots.ranks) == set(missing):
        whom += ", which did not come."
    else:
        whom += f", and in the end for {named(roots.ranks)}, which did not come."
    return " ".join([whom, *(_sentence(rank, roots.seen[rank]) for rank in roots.ranks)])


def _sentence(rank: int, seen: Whereabouts | str) -> str:
    return f"Rank {rank} {seen if isinstance(seen, str) else f'is {seen.said}'}."
