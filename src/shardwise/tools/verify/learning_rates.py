"""Detects scaled learning rates and schedules that run too fast, by comparing both runs' rates."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shardwise.tools.verify.causes import Suspect
from shardwise.tools.verify.records import RecordedTraining

MOST_MICRO_BATCHES = 17
"""End (exclusive) of the range of micro-batches per step to try."""


def suspect_rates(
    reference: RecordedTraining, other: RecordedTraining, size: int
) -> Iterator[Suspect]:
    """Yield a suspect if the learning rates differ from the reference's."""
    rates = recorded_rates(reference)
    apart: list[tuple[float, float]] = []
    for engine, steps in reference.engines.items():
        pairs = zip(steps[1:], other.engines.get(engine, [])[1:], strict=False)
        apart += [(a, b) for x, y in pairs for a, b in zip(x.lr, y.lr, strict=False) if a != b]
    if not apart:
        return
    # Mention the batch size, because a scaled rate may be intended if the batch grows too.
    batch = _batch(reference, other)
    if (times := find_pace(reference, other, size)) > 1:
        yield _fast_schedule(times, rates, batch, of_workers=times == size)
        return
    theirs, ours = apart[0]
    times_as_much = f"{ours / theirs:.6g} times the reference's" if theirs else "instead of"
    how = "is scaled with the number of workers" if size > 1 else "depends on the placement"
    yield Suspect(
        name="lr",
        words=f"the learning rate {how}: {ours:.6g}, {times_as_much} "
        f"{theirs:.6g}{batch}. With the reference's rates the runs agree. Do not scale the rate: "
        "sw.Loader's batch_size is the total, so it does not grow with the workers "
        "(sw.lr.ScaledLR is for batches that do).",
        alter={"lr": rates},
    )


def recorded_rates(reference: RecordedTraining) -> dict[str, list[list[float]]]:
    """Return the reference's learning rates by engine, step and parameter group."""
    return {
        str(engine): [list(step.lr) for step in steps[1:]]
        for engine, steps in reference.engines.items()
    }


def find_pace(reference: RecordedTraining, other: RecordedTraining, size: int) -> int:
    """Return how many times faster the schedule of `other` runs than the reference's.

    The factor is k if the rates of `other` equal the rates of every k-th step of the reference. The
    first k to be tried is `size`, the number of workers, followed by possible numbers of
    micro-batches. Returns 1 if no k fits.
    """
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
        return 1  # the rate is scaled by the number of workers, but the schedule is not faster
    for times in (size, *range(2, MOST_MICRO_BATCHES)):
        # A script that steps the scheduler before engine.step is `times` - 1 steps ahead initially.
        for begin in (0, times - 1):
            # Compare with every `times`-th rate of the reference. A single step would not be enough
            # evidence.
            several = [(theirs[begin::times], ours) for theirs, ours in engines]
            if times > 1 and all(
                min(len(ahead), len(ours)) > 1 and all(map(_same_rates, ours, ahead))
                for ahead, ours in several
            ):
                return int(times)
    return 1


def _same_rates(one: Sequence[float], other: Sequence[float]) -> bool:
    # rel_tol, because a schedule that is computed differently may differ by rounding.
    pairs = zip(one, other, strict=False)
    return len(one) == len(other) and all(math.isclose(a, b, rel_tol=1e-9) for a, b in pairs)


def _batch(reference: RecordedTraining, other: RecordedTraining) -> str:
    """Return a phrase that compares the runs' batch sizes, to end a sentence about the rates."""
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
        + (_STEPPED_BY_WORKERS if of_workers else "Call it once, next to engine.step()."),
        alter={"lr": rates},
    )


_STEPPED_BY_WORKERS = (
    "Accelerate does this with prepared schedulers, unless its batch sizes are totals. Write "
    "DataLoaderConfiguration(split_batches=True) and the total batch size, or do not prepare "
    "the scheduler. In your own loop, step it once."
)
