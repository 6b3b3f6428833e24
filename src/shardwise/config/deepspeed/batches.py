"""The three batch sizes of DeepSpeed's JSON: total = micro-batch x accumulation x workers."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.errors import ConfigError

TOTAL = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
STEPS = "gradient_accumulation_steps"


@dataclass(frozen=True, kw_only=True)
class Batches:
    """Samples of a step over all workers, of one backward of one worker, and backwards a step."""

    total: int
    micro: int
    steps: int


def solve(
    total: int | None, micro: int | None, steps: int | None, workers: int, name: str
) -> Batches:
    """The three sizes for a run of `workers` data-parallel workers, where None is not given, as
    DeepSpeed finds them. Raises ConfigError where they do not multiply out; `name` is the JSON's.
    """
    if total is None and micro is None:
        raise ConfigError(f"{name}: give {TOTAL} or {MICRO}: nothing says how large a batch is.")
    sizes = ((TOTAL, total), (MICRO, micro), (STEPS, steps))
    for key, value in sizes:
        if value is not None and value < 1:
            raise ConfigError(f"{name}: {key} takes a whole number of 1 or more, not {value}.")
    given = " and ".join(f"{key} {value}" for key, value in sizes if value is not None)
    if total is None:
        assert micro is not None
        steps = steps or 1
        total = micro * steps * workers
    elif micro is None:
        steps = steps or 1
        micro = total // workers // steps
    elif steps is None:
        steps = total // micro // workers
    verb = "do" if " and " in given else "does"
    if total != micro * steps * workers or not total:
        raise ConfigError(
            f"{name}: {given} {verb} not multiply out on {workers} worker(s): {TOTAL} is "
            f"{MICRO} x {STEPS} x workers, and {micro} x {steps} x {workers} is "
            f"{micro * steps * workers}. Change one, or the number of workers."
        )
    return Batches(total=total, micro=micro, steps=steps)
