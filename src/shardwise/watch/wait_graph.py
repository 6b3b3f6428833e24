"""Finds the ranks that cause a hang: follows who waits for whom to those that wait for nobody.

Ranks and their waits form a wait-for graph. A rank that has waited too long asks on from rank to
rank until it comes to those that block all others. Pure but for what it asks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Abort:
    """Why rank `rank` aborted; `lost` where another rank had ended."""

    rank: int
    text: str
    lost: bool


@dataclass(frozen=True, kw_only=True)
class RankStatus:
    """What a rank reports of itself.

    `call` is the collective that it waits in for the ranks `missing`, for `seconds`; "" where it
    waits in none. `verb` is the method of this library that it is in, `line` the user's line.
    """

    rank: int
    call: str = ""
    missing: tuple[int, ...] = ()
    seconds: float = 0.0
    verb: str = ""
    line: str = ""
    step: int | None = None
    abort: Abort | None = None
    stack: tuple[str, ...] = ()

    @property
    def place(self) -> str:
        """Where the rank is, in words: "in engine.save (train.py:88)"."""
        if self.verb and self.line:
            return f"in {self.verb} ({self.line})"
        return f"in {self.verb}" if self.verb else f"at {self.line}" if self.line else "at its end"

    @property
    def activity(self) -> str:
        """What the rank does, in words that go on from "is"."""
        if not self.call:
            return f"in no collective, {self.place}"
        return f"{self.place}: {self.call}, for {named(self.missing)}"


Statuses = Mapping[int, RankStatus | str]
"""By rank its status, or in words why it gives none."""

AskStatuses = Callable[[Collection[int]], Statuses]


@dataclass(frozen=True, kw_only=True)
class BlockingRanks:
    """The ranks that a hang is to be blamed on.

    `ranks` are waited for and wait for nobody; where all wait in a circle, `is_circle` is true and
    they are all of it. `abort` is that of a rank on the way which has aborted.
    """

    ranks: tuple[int, ...]
    statuses: Statuses
    abort: Abort | None = None
    is_circle: bool = False


def find_blocking_ranks(asker: int, missing: Collection[int], ask: AskStatuses) -> BlockingRanks:
    """Ask who waits for whom, starting with the ranks that `asker` misses."""
    statuses: dict[int, RankStatus | str] = {}
    found: set[int] = set()
    next_ones = set(missing) - {asker}
    while next_ones:
        answers = ask(sorted(next_ones))
        statuses.update(answers)
        further: set[int] = set()
        for rank, answer in answers.items():
            if isinstance(answer, str) or not answer.missing:
                found.add(rank)
            else:
                further.update(answer.missing)
            if isinstance(answer, RankStatus) and answer.abort is not None:
                return BlockingRanks(ranks=(rank,), statuses=statuses, abort=answer.abort)
        next_ones = further - statuses.keys() - {asker}
    ranks = tuple(sorted(found or statuses))
    return BlockingRanks(ranks=ranks, statuses=statuses, is_circle=not found)


def named(ranks: Iterable[int]) -> str:
    """List ranks in words: "rank 2", "ranks 0, 2", or "ranks 0, 2-5"."""
    listed = sorted(ranks)
    rows: list[list[int]] = []
    for rank in listed:
        if rows and rank == rows[-1][-1] + 1:
            rows[-1].append(rank)
        else:
            rows.append([rank])
    words = [f"{row[0]}-{row[-1]}" if len(row) > 2 else ", ".join(map(str, row)) for row in rows]
    return f"rank{'s' if len(listed) > 1 else ''} {', '.join(words)}"


def describe_wait(missing: Collection[int], blocking: BlockingRanks) -> str:
    """Say which ranks did not come, and what those that block them do instead."""
    whom = named(missing)
    if blocking.is_circle or set(blocking.ranks) == set(missing):
        whom += ", which did not come."
    else:
        whom += f", and in the end for {named(blocking.ranks)}, which did not come."
    sentences = [whom]
    for rank in blocking.ranks:
        status = blocking.statuses[rank]
        does = status if isinstance(status, str) else f"is {status.activity}"
        sentences.append(f"Rank {rank} {does}.")
    return " ".join(sentences)
