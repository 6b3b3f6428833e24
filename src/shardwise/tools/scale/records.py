"""Reads the records of the ranks of a run (step_log.py), and computes its rate and curves."""

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
"""Values by epoch or by step, both counted from 0."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The result of a run of `steps` steps, without the first `dropped` for the rate.

    `batch` is the total batch of a typical step, `seconds` its duration. `loss` is the mean loss of
    each epoch, `losses` the loss of each step. `means` are the last values of Metrics in each
    epoch, by name.
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
    """Raised if a run has too few steps to measure."""


def read(folder: Path, ranks: int, warmup: int) -> Measured:
    """Read the records of `ranks` ranks in `folder`. Raises TooFew."""
    paths = [folder / f"rank-{rank}.jsonl" for rank in range(ranks)]
    if missing := [str(rank) for rank, path in enumerate(paths) if not path.exists()]:
        raise TooFew(
            f"{folder} has no record of rank(s) {', '.join(missing)}. Does the script call sw.init "
            "or hvd.init? With several hosts, --out must be a folder on a file system that all of "
            "them share, under the same path."
        )
    rows = [list(_rows(path)) for path in paths]
    # Other rows hold the means of sw.Metrics.
    own = [[row for row in of_rank if "step" in row] for of_rank in rows]
    # A run that is stopped may end between the ranks' writes: use the steps that all have.
    count = min(map(len, own))
    if count == 0:
        raise TooFew(
            "no step was recorded. Does the script train with sw.Loader and sw.Engine, or with "
            "shardwise.horovod and torch's DataLoader?"
        )
    if count <= warmup:
        raise TooFew(
            f"it made {count} step(s), and --warmup {warmup} drops as many or more. Give a smaller "
            "--warmup, or more steps."
        )
    steps = list(zip(*(of_rank[:count] for of_rank in own), strict=True))
    # Of all ranks: with uneven shares no rank alone knows the batch.
    samples = [sum(row["samples"] for row in step) for step in steps]
    if not sum(samples[warmup:]):
        raise TooFew(
            "its steps have no samples. They are counted by sw.Loader, by world.share or, with "
            "shardwise.horovod, by torch's DataLoader."
        )
    seconds = [_seconds(step) for step in steps]
    return Measured(
        steps=count,
        dropped=warmup,
        batch=int(median(samples[warmup:])),
        seconds=median(seconds[warmup:]),
        rate=rate(samples[warmup:], seconds[warmup:]),
        # An engine reports the same loss on every rank, so rank 0's record is enough.
        loss=_loss(own[0][:count]),
        losses={n: row["loss"] for n, row in enumerate(own[0][:count]) if _is_loss(row)},
        means=_means(row for row in rows[0] if "means" in row),
    )


def steps_made(folder: Path) -> int:
    """Return the number of steps that rank 0 of a run has recorded so far."""
    try:
        return (folder / "rank-0.jsonl").read_bytes().count(b'{"step"')
    except FileNotFoundError:
        return 0


def _seconds(step: Sequence[Mapping[str, Any]]) -> float:
    """Return how long a step took, from when the last rank asked for its data.

    All ranks end a step together, so the time between two ends is the same on all, up to jitter
    that the mean removes. A rank that asked first has waited for ranks that were still busy
    outside of the step, for example with an evaluation on rank 0 alone. That wait is not counted.
    """
    between: list[float] = [row["between"] for row in step]
    whole: float = mean(row["between"] + row["seconds"] for row in step)
    return whole - max(between)


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the complete lines of a record. A crash may have cut off the last one."""
    for line in path.read_text().splitlines():
        try:
            # Ranks append line by line, so only the last one can be incomplete.
            yield json.loads(line)
        except json.JSONDecodeError:
            return


def _loss(rows: list[dict[str, Any]]) -> Curve:
    """Return the mean loss of each epoch, over all items."""
    sums: dict[int, tuple[float, float]] = {}
    for row in rows:
        if _is_loss(row):
            total, weight = sums.get(row["epoch"], (0.0, 0.0))
            added = row["loss"] * row["weight"]
            sums[row["epoch"]] = total + added, weight + row["weight"]
    return {epoch: total / weight for epoch, (total, weight) in sums.items() if weight}


def _is_loss(row: Mapping[str, Any]) -> bool:
    """Return whether the step has a loss. Horovod's optimizer sees none."""
    return math.isfinite(row["loss"])


def _means(rows: Iterator[dict[str, Any]]) -> dict[str, Curve]:
    """Return the curves of the means by name, for training and evaluation."""
    curves: dict[str, Curve] = {}
    for row in rows:
        of = "training" if row["training"] else "evaluation"
        for name, value in row["means"].items():
            if math.isfinite(value):
                curves.setdefault(f"{of} {name}", {})[row["epoch"]] = value
    return curves
