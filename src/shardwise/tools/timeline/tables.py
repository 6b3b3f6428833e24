"""Formats the results of `shardwise timeline` as tables and as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from statistics import mean
from typing import Any

from rich.table import Table

from shardwise.tools.timeline.slowest import means, slowest
from shardwise.tools.timeline.steps import EXPOSED, KINDS, StepTimes

Steps = Mapping[int, Sequence[StepTimes]]

_HEADINGS = {EXPOSED: "exposed", "checkpoint": "save", "other": "script"}

_MEANINGS = {
    "all": "ms, the whole step, from the end of the previous step to its own end",
    "data": "ms, waiting for the next batch and copying it to the device",
    "forward": "ms, in the forwards of the models",
    "backward": "ms, in backward, except exposed communication",
    "exposed": "ms, communicating while doing nothing else",
    "update": "ms, updating the parameters",
    "save": "ms, saving or loading checkpoints, except writes in the background",
    "script": "ms, the rest: the script's own code; with the six columns before, the whole step",
    "asleep": "ms, of exposed: waiting for other ranks to arrive",
    "hidden": "ms, collectives in parallel with other work, which cost the step no time",
    "MB": "10^6 bytes that this rank passed to collectives",
}
"""The meaning of each column, with its unit."""


def per_rank(steps: Steps) -> Table:
    """Return a table with one row per rank: the mean time per step by kind."""
    count = max(map(len, steps.values()))
    table = _table(f"Milliseconds per step, mean of {count}", ["rank"])
    for rank, own in steps.items():
        table.add_row(str(rank), *_cells(own))
    return table


def per_step(steps: Iterable[StepTimes]) -> Table:
    """Return a table with one row per step and rank."""
    table = _table("Step by step", ["step", "rank"])
    for step in sorted(steps, key=lambda step: (step.number, step.rank)):
        table.add_row(str(step.number), str(step.rank), *_cells([step]))
    return table


def longest(steps: Steps, count: int) -> list[StepTimes]:
    """Return the `count` longest steps, with one entry per rank for each of them."""
    worst: dict[int, float] = {}
    for step in (step for own in steps.values() for step in own):
        worst[step.number] = max(step.seconds, worst.get(step.number, 0.0))
    # Select by step number, to include every rank's time for each of these steps.
    kept = set(sorted(worst, key=lambda number: -worst[number])[:count])
    return [step for own in steps.values() for step in own if step.number in kept]


def legend() -> list[str]:
    """Return lines that explain the columns of the tables, one per column."""
    width = max(map(len, _MEANINGS))
    return [f"{heading:>{width}}  {meaning}" for heading, meaning in _MEANINGS.items()]


def words(steps: Steps) -> list[str]:
    """Return sentences about hidden communication and the slowest rank."""
    every = [step for own in steps.values() for step in own]
    exposed, hidden = mean(s.exposed for s in every), mean(s.hidden for s in every)
    lines = []
    if exposed + hidden > 0:
        share = hidden / (exposed + hidden)
        lines.append(
            f"communication: {(exposed + hidden) * 1e3:.1f} ms per step: {hidden * 1e3:.1f} ms "
            f"({share:.0%}) hidden behind other work, {exposed * 1e3:.1f} ms exposed, "
            f"including {mean(s.waited for s in every) * 1e3:.1f} ms asleep"
        )
    last = slowest(steps)
    if last is not None:
        lines.append(str(last))
    elif len(steps) > 1:
        lines.append("no rank is slowest: all have about the same work")
    return lines


def as_json(steps: Steps, every: Steps) -> dict[str, Any]:
    """Return all results, in seconds, as values that JSON can represent.

    `steps` contains the steps from which the means are computed, and `every` contains all steps.
    """
    last = slowest(steps)
    return {
        "ranks": [
            {
                "rank": rank,
                "steps": len(own),
                "seconds": mean(step.seconds for step in own),
                "spent": means(own),
                "exposed": mean(step.exposed for step in own),
                "hidden": mean(step.hidden for step in own),
                "waited": mean(step.waited for step in own),
                "bytes": mean(step.nbytes for step in own),
            }
            for rank, own in steps.items()
        ],
        "slowest": None if last is None else asdict(last) | {"why": str(last)},
        "steps": [
            asdict(step) | {"exposed": step.exposed} for own in every.values() for step in own
        ],
    }


def _table(title: str, first: Sequence[str]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), title=title, title_justify="left")
    spent = [_HEADINGS.get(kind, kind) for kind in KINDS]
    for heading in [*first, "all", *spent, "asleep", "hidden", "MB"]:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _cells(steps: Sequence[StepTimes]) -> list[str]:
    spent = means(steps)
    figures = [mean(step.seconds for step in steps), *(spent[kind] for kind in KINDS)]
    figures += [mean(step.waited for step in steps), mean(step.hidden for step in steps)]
    sent = mean(step.nbytes for step in steps) / 1e6
    return [*(f"{figure * 1e3:.1f}" for figure in figures), f"{sent:.1f}"]
