"""Reads what the ranks of a run recorded (step_log.py), and computes its rate and curves."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Any

from shardwise.tools.scale.estimates import Rate, rate

Curve = dict[int, float]
"""Values by epoch, or by step; both are counted from 0."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The result of a run of `steps` steps, of which the first `dropped` do not count for the rate.

    `batch` is the total batch of a usual step, `seconds` the length of one. `loss` is the mean of
    each epoch, `losses` that of each step, `means` what Metrics computed last in an epoch, by name.
    """

    steps: int
    dropped: int
    batch: int
    seconds: float
    rate: Rate
    loss: Curve
    losses: Curve = field(default_factory=dict)
    means: Mapping[str, Curve] = field(default_factory=dict)


class TooFew(Exception):
    """Raised for a run without enough steps to measure."""


def read(folder: Path, ranks: int, warmup: int) -> Measured:
    """Read the records of `ranks` ranks in `folder`. Raises TooFew."""
    paths = [folder / f"rank-{rank}.jsonl" for rank in range(ranks)]
    if missing := [str(rank) for rank, path in enumerate(paths) if not path.exists()]:
        raise TooFew(
            f"{folder} has no record of rank(s) {', '.join(missing)}: does the script call sw.init "
            "or hvd.init? With several hosts, --out must be on a file system that all of them "
            "share, under the same path."
        )
    rows = [list(_rows(path)) for path in paths]
    own = [[row for row in of_rank if "step" in row] for of_rank in rows]
    made = min(map(len, own))
    if made == 0:
        raise TooFew(
            "it made no step that was recorded: does the script train with sw.Loader and "
            "sw.Engine, or with shardwise.horovod and torch's DataLoader?"
        )
    if made <= warmup:
        raise TooFew(
            f"it made {made} step(s), of which --warmup {warmup} are dropped: give a smaller "
            "--warmup, or more steps."
        )
    steps = list(zip(*(of_rank[:made] for of_rank in own), strict=True))
    samples = [sum(row["samples"] for row in step) for step in steps]
    if not sum(samples[warmup:]):
        raise TooFew(
            "no samples were counted in its steps: they are those of sw.Loader, of world.share or, "
            "with shardwise.horovod, of torch's DataLoader."
        )
    seconds = [_seconds(step) for step in steps]
    return Measured(
        steps=made,
        dropped=warmup,
        batch=int(median(samples[warmup:])),
        seconds=median(seconds[warmup:]),
        rate=rate(samples[warmup:], seconds[warmup:]),
        loss=_loss(own[0][:made]),
        losses={n: row["loss"] for n, row in enumerate(own[0][:made]) if _is_loss(row)},
        means=_means(row for row in rows[0] if "means" in row),
    )


def steps_made(folder: Path) -> int:
    """The number of steps that rank 0 of a run has recorded so far."""
    try:
        return (folder / "rank-0.jsonl").read_bytes().count(b'{"step"')
    except FileNotFoundError:
        return 0


def _seconds(step: Sequence[Mapping[str, Any]]) -> float:
    """How long a step took, from when the last rank asked for its data.

    The ranks end steps together: from end to end is as long on all, but for jitter, of which the
    mean is free. Who asked first has waited in the step for those who were still at something else,
    such as an evaluation by rank 0 alone.
    """
    between: list[float] = [row["between"] for row in step]
    whole: float = mean(row["between"] + row["seconds"] for row in step)
    return whole - max(between)


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    """The complete lines of a record; one that a crash has cut is left out."""
    for line in path.read_text().splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            return


def _loss(rows: list[dict[str, Any]]) -> Curve:
    """The mean loss of each epoch, over all items."""
    sums: dict[int, tuple[float, float]] = {}
    for row in rows:
        if _is_loss(row):
            total, weight = sums.get(row["epoch"], (0.0, 0.0))
            added = row["loss"] * row["weight"]
            sums[row["epoch"]] = total + added, weight + row["weight"]
    return {epoch: total / weight for epoch, (total, weight) in sums.items() if weight}


def _is_loss(row: Mapping[str, Any]) -> bool:
    """Whether the step of `row` had a loss that can be shown; Horovod's optimizer sees none."""
    return math.isfinite(row["loss"])


def _means(rows: Iterator[dict[str, Any]]) -> dict[str, Curve]:
    """The means by name, of training or of an evaluation."""
    found: dict[str, Curve] = {}
    for row in rows:
        of = "training" if row["training"] else "evaluation"
        for name, value in row["means"].items():
            if math.isfinite(value):
                found.setdefault(f"{of} {name}", {})[row["epoch"]] = value
    return found
