"""Finds the slowest rank and the kind of work that slows it down. Does no I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median

from shardwise.tools.timeline.steps import EXPOSED, KINDS, StepTimes

NOTABLE = 0.05
"""A rank is reported only if it is slower than the others by this fraction of a step."""

_WHERE = {
    "data": "waiting for its next batch (more num_workers in the Loader, or a faster disk)",
    "forward": "in forward",
    "backward": "in backward",
    EXPOSED: "in the work of communication: summing and copying",
    "update": "in the update",
    "checkpoint": "saving (background=True writes in parallel with training)",
    "other": "in the script's own code, outside of forward, backward and step",
}


@dataclass(frozen=True)
class Slowest:
    """The slowest rank.

    On average, it is busy for `seconds` longer per step than the median of the other ranks. Work of
    kind `kind` accounts for `more` of these seconds. It was the slowest rank in `times` of `steps`
    steps.
    """

    rank: int
    seconds: float
    kind: str
    more: float
    times: int
    steps: int

    def __str__(self) -> str:
        of_them = f"{self.seconds * 1e3:.1f} ms per step more than the others"
        return (
            f"rank {self.rank} is slowest: {of_them}, {self.more * 1e3:.1f} ms of it "
            f"{_WHERE[self.kind]}; the others waited for it in {self.times} of {self.steps} steps"
        )


def counted(steps: Mapping[int, Sequence[StepTimes]]) -> dict[int, list[StepTimes]]:
    """Return the steps from which to compute statistics, without each rank's first step.

    The first step includes the start of the run. It is used only if a rank has no other step.
    """
    return {rank: list(own[1:] if len(own) > 1 else own) for rank, own in steps.items() if own}


def means(steps: Sequence[StepTimes]) -> dict[str, float]:
    """Return the mean time per step, in seconds by kind."""
    return {kind: mean(step.spent[kind] for step in steps) for kind in KINDS}


def slowest(steps: Mapping[int, Sequence[StepTimes]]) -> Slowest | None:
    """Return the rank for which the others wait.

    Returns None if all ranks take about the same time or there is only one rank. Ranks are compared
    by their time excluding waits, because a rank with less work waits longer.
    """
    ranks = [rank for rank, own in steps.items() if own]
    # A single rank does not delay any other rank.
    if len(ranks) < 2:
        return None
    busy = {rank: mean(step.busy for step in steps[rank]) for rank in ranks}
    # Compare busy time rather than total time: steps end at the same time on all ranks, so their
    # total times are equal.
    last = max(busy, key=lambda rank: busy[rank])
    others = [rank for rank in ranks if rank != last]
    # Use the median, because several ranks on a slow host may be slow.
    behind = busy[last] - median(busy[rank] for rank in others)
    if behind < NOTABLE * mean(step.seconds for step in steps[last]):
        return None
    work = {rank: means(steps[rank]) for rank in ranks}
    # Waits are part of exposed communication, so subtract them from it.
    for rank, own in work.items():
        own[EXPOSED] -= mean(min(step.waited, step.exposed) for step in steps[rank])
    more = {kind: work[last][kind] - median(work[r][kind] for r in others) for kind in KINDS}
    # The cause is the kind of work with the largest difference from the median of the others.
    kind = max(more, key=lambda kind: more[kind])
    # For each step that all ranks recorded, collect the times of every rank.
    by_number = [{step.number: step for step in own} for own in steps.values() if own]
    common = sorted(set.intersection(*map(set, by_number)))
    together = [{own[number].rank: own[number] for own in by_number} for number in common]
    times = sum(max(own, key=lambda rank: own[rank].busy) == last for own in together)
    return Slowest(last, behind, kind, more[kind], times, len(together))
