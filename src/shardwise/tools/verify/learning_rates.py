"""Suspects a learning rate, or the pace of its schedule, from the rates of both runs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shardwise.tools.verify.causes import Suspect
from shardwise.tools.verify.records import Training

MOST_MICRO_BATCHES = 17
"""Up to how many steps of a scheduler in one step are looked for."""

Rates = tuple[float, ...]
"""The learning rates of a step, by parameter group."""


def suspects(reference: Training, other: Training, size: int) -> Iterator[Suspect]:
    """Learning rates that are other ones than the reference's."""
    rates = recorded(reference)
    apart: list[tuple[float, float]] = []
    for engine, steps in reference.engines.items():
        pairs = zip(steps[1:], other.engines.get(engine, [])[1:], strict=False)
        apart += [(a, b) for x, y in pairs for a, b in zip(x.lr, y.lr, strict=False) if a != b]
    if not apart:
        return
    batch = _batch(reference, other)
    if (times := pace(reference, other, size)) > 1:
        yield _fast_schedule(times, rates, batch, of_workers=times == size)
        return
    theirs, ours = apart[0]
    times_as_much = f"{ours / theirs:.6g} times the reference's" if theirs else "another one"
    how = "is scaled with the number of workers" if size > 1 else "depends on the placement"
    yield Suspect(
        name="lr",
        words=f"the learning rate {how}: {ours:.6g}, {times_as_much} "
        f"{theirs:.6g}{batch}. With the reference's rates the runs "
        "agree. Leave the rate as it is: sw.Loader's batch_size is the total, so nothing grows "
        "with the workers (sw.lr.ScaledLR is for batches that do).",
        alter={"lr": rates},
    )


def recorded(reference: Training) -> dict[str, list[list[float]]]:
    """By engine the learning rates of each step."""
    return {
        str(engine): [list(step.lr) for step in steps[1:]]
        for engine, steps in reference.engines.items()
    }


def pace(reference: Training, other: Training, size: int) -> int:
    """How many steps of the reference's schedule each step makes, where all rates are those of so
    many times the step: once for each of `size` workers, or for each micro-batch; else 1."""
    engines = [
        ([step.lr for step in reference.engines.get(engine, [])[1:]], [step.lr for step in steps])
        for engine, (_, *steps) in other.engines.items()
    ]
    pairs = [pair for theirs, ours in engines for pair in zip(theirs, ours, strict=False)]
    if all(its == mine for its, mine in pairs):
        return 1
    if all(ours[0] != theirs[0] for theirs, ours in engines if theirs and ours) and all(
        _same_rates(mine, [size * rate for rate in its]) for its, mine in pairs
    ):
        return 1  # scaled with the workers
    for times in (size, *range(2, MOST_MICRO_BATCHES)):
        # One who steps it before engine.step has made all of them by the first step.
        for begin in (0, times - 1):
            if times > 1 and all(_runs_ahead(*each, times, begin) for each in engines):
                return int(times)
    return 1


def _runs_ahead(theirs: Sequence[Rates], ours: Sequence[Rates], times: int, begin: int) -> bool:
    """Whether `ours` are each `times`th of `theirs` from number `begin` on, as far as both are
    known: for two steps at least."""
    ahead = theirs[begin::times]
    known = min(len(ours), len(ahead))
    return known > 1 and all(map(_same_rates, ours[:known], ahead[:known]))


def _same_rates(one: Sequence[float], other: Sequence[float]) -> bool:
    pairs = zip(one, other, strict=False)
    return len(one) == len(other) and all(math.isclose(a, b, rel_tol=1e-9) for a, b in pairs)


def _batch(reference: Training, other: Training) -> str:
    """What the rates of `other` do not follow from, or may."""
    for engine, steps in reference.engines.items():
        for its, mine in zip(steps[1:], other.engines.get(engine, [])[1:], strict=False):
            if (rows := (mine.fed.rows, its.fed.rows))[0] != rows[1]:
                return f"; a step trains on {rows[0]} rows, and on {rows[1]} in the reference"
    return ", though the total batch is the same"


def _fast_schedule(
    times: int, rates: Mapping[str, Any], batch: str, *, of_workers: bool
) -> Suspect:
    return Suspect(
        name="lr",
        words=f"the learning-rate scheduler is stepped {times} times in each step, once for each "
        f"{'worker' if of_workers else 'micro-batch'}{batch}. With "
        "the reference's rates the runs agree. "
        + (_STEPPED_BY_WORKERS if of_workers else "Step it beside engine.step(), once."),
        alter={"lr": rates},
    )


_STEPPED_BY_WORKERS = (
    "Accelerate does so for schedulers that are prepared, unless its batches are totals: write "
    "DataLoaderConfiguration(split_batches=True) and the total batch size, or do not prepare "
    "the scheduler. In a loop of your own step it once."
)
