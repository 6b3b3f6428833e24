"""Decides which ranks are left after a loss, and whether the step in progress stands.

A commit is a step, or a call such as `engine.save`. Each rank counts:

    prepared    number of commits that this rank could finish alone: it has a step's totals
    confirmed   number of commits that every rank was prepared for, as far as this one knows

A rank updates only after it has confirmed the step. So a step that one rank has confirmed is
prepared on all, and everybody can finish it. A step that no remaining rank has confirmed has
changed nothing that is left, and is repeated. A lost rank may have confirmed and updated a step,
but its state is lost with it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from shardwise.errors import CollectiveError


@dataclass(frozen=True, kw_only=True)
class Report:
    """The report of a rank that has lost another one.

    Args:
        rank: Its number in the run.
        generation: Number of decisions before this one, as far as it knows.
        prepared: Number of commits that it could finish alone.
        confirmed: Number of commits that every rank was prepared for, as far as it knows.
    """

    rank: int
    generation: int
    prepared: int
    confirmed: int


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The remaining ranks, and the commits that stand.

    Args:
        generation: Number of this group, higher than in every report.
        members: Ranks of the run that are left, in ascending order. The first one hosts the
            store that connects them.
        confirmed: Number of commits that all members finish before they continue.
        address: Where the first member listens.
        port: Its port.
    """

    generation: int
    members: tuple[int, ...]
    confirmed: int
    address: str = ""
    port: int = 0


def leader(members: Sequence[int], ended: Collection[int]) -> int:
    """Return the rank that decides: the lowest of `members` whose process has not ended."""
    return min(rank for rank in members if rank not in ended)


def decide(
    reports: Mapping[int, Report], members: Sequence[int], ended: Collection[int]
) -> Decision | None:
    """Return the decision, or None while a rank that has not ended has not reported.

    Args:
        reports: The reports so far, by rank.
        members: The ranks of the last group that could train.
        ended: Those whose processes have ended.

    Raises:
        CollectiveError: The reports contradict each other.
    """
    left = tuple(sorted(rank for rank in members if rank not in ended))
    if any(rank not in reports for rank in left):
        return None
    heard = [reports[rank] for rank in left]
    confirmed = max(report.confirmed for report in heard)
    unprepared = [report.rank for report in heard if report.prepared < confirmed]
    if unprepared:
        raise CollectiveError(
            f"Step {confirmed} is complete on some ranks, but ranks "
            f"{', '.join(map(str, unprepared))} do not know its totals. Start again from the last "
            "checkpoint."
        )
    # A rank that reports an older generation does not know of a later decision. That decision's
    # group was never formed, because its first member ended.
    generation = 1 + max(report.generation for report in heard)
    return Decision(generation=generation, members=left, confirmed=confirmed)


def stands(decision: Decision, mine: Report) -> bool:
    """Return whether the step in progress on this rank stands, so that the rank must finish it.

    If not, the rank repeats the step.
    """
    return decision.confirmed > mine.confirmed


def check_number(members: Sequence[int], left: Sequence[int], most: int) -> None:
    """Raise CollectiveError if more than `most` of `members` are no longer among `left`."""
    lost = [rank for rank in members if rank not in left]
    if len(lost) > most:
        raise CollectiveError(
            f"{len(lost)} workers were lost at once (ranks {', '.join(map(str, lost))}), more than "
            f"--survive {most} allows. Start again from the last checkpoint; with --restarts the "
            "launcher does so."
        ).blaming(lost)


def holders(members: Sequence[int], left: Sequence[int]) -> list[int]:
    """Return who holds the sharded state of each of `members`: the index of a rank in `left`.

    Each member's state has a second copy on the next member; the last one's is on the first.

    Raises:
        CollectiveError: A member and the one that held its copy are both lost.
    """
    found = []
    for place, rank in enumerate(members):
        copy = members[(place + 1) % len(members)]
        holder = rank if rank in left else copy
        if holder not in left:
            raise CollectiveError(
                f"Ranks {rank} and {copy} were lost together, and rank {copy} held the second copy "
                f"of rank {rank}'s optimizer state. Start again from the last checkpoint; with "
                "--restarts the launcher does so."
            ).blaming([rank, copy])
        found.append(left.index(holder))
    return found
