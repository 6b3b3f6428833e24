"""Finds the ranks that cause a hang, by following waits to the ranks that are not waiting.

Ranks and their waits form a wait-for graph. A rank that has waited too long asks the ranks that it
waits for, then the ranks that those wait for, and so on, until it finds the ranks that block all
others:

    0 waits for 1, 2      1 waits for 3      2 waits for 3      3 computes: 3 blocks all

It communicates only through its `ask` argument.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Abort:
    """The reason why rank `rank` aborted. If it lost another rank, `lost` is True."""

    rank: int
    text: str
    lost: bool


@dataclass(frozen=True, kw_only=True)
class RankStatus:
    """The status that a rank reports.

    The rank has waited for `seconds` in the collective `call` for the ranks in `missing`. `call` is
    "" if it is not waiting. `verb` is the library method that it is running, and `line` the current
    line in the user's code.
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
        """The rank's position, such as "in engine.save (train.py:88)"."""
        if self.verb and self.line:
            return f"in {self.verb} ({self.line})"
        return f"in {self.verb}" if self.verb else f"at {self.line}" if self.line else "at its end"

    @property
    def activity(self) -> str:
        """Description of the rank's activity that can follow "is"."""
        if not self.call:
            return f"in no collective, {self.place}"
        return f"{self.place}: {self.call}, for {named(self.missing)}"


Statuses = Mapping[int, RankStatus | str]
"""Maps each rank to its status, or to text that explains why it does not answer."""

AskStatuses = Callable[[Collection[int]], Statuses]


@dataclass(frozen=True, kw_only=True)
class BlockingRanks:
    """The ranks that cause a hang.

    Other ranks wait for `ranks`, which themselves wait for no one. If the waits form a cycle,
    `is_circle` is True and `ranks` is the entire cycle. `abort` is set if one of the ranks has
    aborted.
    """

    ranks: tuple[int, ...]
    statuses: Statuses
    abort: Abort | None = None
    is_circle: bool = False


def find_blocking_ranks(asker: int, missing: Collection[int], ask: AskStatuses) -> BlockingRanks:
    """Follow waits from rank to rank, starting with the ranks that `asker` waits for."""
    statuses: dict[int, RankStatus | str] = {}
    blocking: set[int] = set()
    frontier = set(missing) - {asker}
    # Search breadth first, asking all ranks at the same distance at once: a request takes up to
    # ANSWER_SECONDS.
    while frontier:
        answers = ask(sorted(frontier))
        statuses.update(answers)
        further: set[int] = set()
        for rank, answer in answers.items():
            # A rank that does not answer blocks the others just like one that computes.
            if isinstance(answer, str) or not answer.missing:
                blocking.add(rank)
            else:
                further.update(answer.missing)
            if isinstance(answer, RankStatus) and answer.abort is not None:
                return BlockingRanks(ranks=(rank,), statuses=statuses, abort=answer.abort)
        frontier = further - statuses.keys() - {asker}
    # If every rank that was asked is itself waiting, the waits form a cycle.
    ranks = tuple(sorted(blocking or statuses))
    return BlockingRanks(ranks=ranks, statuses=statuses, is_circle=not blocking)


def named(ranks: Iterable[int]) -> str:
    """Return ranks as text: "rank 2", "ranks 0, 2", or "ranks 0, 2-5"."""
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
    """Name the missing ranks, and describe the ranks that block them.

    The text can follow "waited for".
    """
    whom = named(missing)
    if blocking.is_circle or set(blocking.ranks) == set(missing):
        whom += ", which did not join."
    else:
        whom += f", blocked by {named(blocking.ranks)}, which did not join."
    sentences = [whom]
    for rank in blocking.ranks:
        status = blocking.statuses[rank]
        does = status if isinstance(status, str) else f"is {status.activity}"
        sentences.append(f"Rank {rank} {does}.")
    return " ".join(sentences)
