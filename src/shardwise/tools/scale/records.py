"""Reads the step records of a run's ranks (see step_log.py), and computes throughput and curves."""

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
"""Values by epoch or by step, both numbered from 0."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The result of a run.

    Attributes:
        steps: Number of steps.
        dropped: Number of warm-up steps that `rate` excludes.
        batch: Median total batch size in samples.
        seconds: Median duration of a step.
        rate: Throughput in samples per second.
        loss: Mean loss of each epoch.
        losses: Loss of each step.
        means: For each mean that sw.Metrics computed, its last value in each epoch.
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
    """Read the records of `ranks` ranks in `folder`, and drop `warmup` steps.

    Raises TooFew if a record is missing or no steps remain.
    """
    paths = [folder / f"rank-{rank}.jsonl" for rank in range(ranks)]
    if missing := [str(rank) for rank, path in enumerate(paths) if not path.exists()]:
        raise TooFew(
            f"{folder} has no record of rank(s) {', '.join(missing)}. Does the script call sw.init "
            "or hvd.init? With several hosts, --out must be a folder on a file system that all of "
            "them share, under the same path."
        )
    rows = [list(_rows(path)) for path in paths]
    # Rows without a step contain the means of sw.Metrics.
    own = [[row for row in of_rank if "step" in row] for of_rank in rows]
    # A run can be stopped when only some ranks have written a step, so use the steps that all ranks
    # have written.
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
    # Sum over all ranks, because with uneven shares the total batch cannot be computed from one
    # rank.
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
        # An engine reports the same loss on every rank, so rank 0's record is sufficient.
        loss=_loss(own[0][:count]),
        losses={n: row["loss"] for n, row in enumerate(own[0][:count]) if _is_loss(row)},
        means=_means(row for row in rows[0] if "means" in row),
    )


def steps_made(folder: Path) -> int:
    """Return the number of steps that rank 0 has recorded so far."""
    try:
        return (folder / "rank-0.jsonl").read_bytes().count(b'{"step"')
    except FileNotFoundError:
        return 0


def _seconds(step: Sequence[Mapping[str, Any]]) -> float:
    """Return a step's duration, measured from the moment when the last rank requested its batch.

    All ranks finish a step at the same time, so the time between the ends of two steps is the same
    on all ranks, apart from jitter that the mean removes. A rank that requests its batch early
    waits for ranks that are still busy outside the step, for example if only rank 0 runs an
    evaluation. This wait is not included.
    """
    between: list[float] = [row["between"] for row in step]
    whole: float = mean(row["between"] + row["seconds"] for row in step)
    return whole - max(between)


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the complete lines of a record. After a crash, the last line may be incomplete."""
    for line in path.read_text().splitlines():
        try:
            # Ranks append line by line, so only the last line can be incomplete.
            yield json.loads(line)
        except json.JSONDecodeError:
            return


def _loss(rows: list[dict[str, Any]]) -> Curve:
    """Return the mean loss of each epoch, weighted by the number of items in each step."""
    sums: dict[int, tuple[float, float]] = {}
    for row in rows:
        if _is_loss(row):
            total, weight = sums.get(row["epoch"], (0.0, 0.0))
            added = row["loss"] * row["weight"]
            sums[row["epoch"]] = total + added, weight + row["weight"]
    return {epoch: total / weight for epoch, (total, weight) in sums.items() if weight}


def _is_loss(row: Mapping[str, Any]) -> bool:
    """Return whether a step has a loss. Steps of Horovod's optimizer have none."""
    return math.isfinite(row["loss"])


def _means(rows: Iterator[dict[str, Any]]) -> dict[str, Curve]:
    """Return each mean's curve, named "training NAME" or "evaluation NAME"."""
    curves: dict[str, Curve] = {}
    for row in rows:
        of = "training" if row["training"] else "evaluation"
        for name, value in row["means"].items():
            if math.isfinite(value):
                curves.setdefault(f"{of} {name}", {})[row["epoch"]] = value
    return curves
