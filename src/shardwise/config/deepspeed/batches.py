"""The three batch sizes of a DeepSpeed JSON: total = micro-batch x accumulation x workers."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.errors import ConfigError

TOTAL = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
STEPS = "gradient_accumulation_steps"


@dataclass(frozen=True, kw_only=True)
class Batches:
    """Batch sizes in samples: `total` per step over all workers, `micro` per backward of a worker.

    `steps` is the number of backwards per optimizer step.
    """

    total: int
    micro: int
    steps: int


def solve(
    total: int | None, micro: int | None, steps: int | None, workers: int, name: str
) -> Batches:
    """Complete the three sizes for `workers` data-parallel workers, by the rules of DeepSpeed.

    A size that the JSON does not give is None. `name` is the JSON's name for messages.
    Raises ConfigError if total = micro x steps x workers cannot hold.
    """
    if total is None and micro is None:
        raise ConfigError(f"{name}: the batch size is missing. Give {TOTAL} or {MICRO}.")
    sizes = ((TOTAL, total), (MICRO, micro), (STEPS, steps))
    for key, value in sizes:
        if value is not None and value < 1:
            raise ConfigError(f"{name}: {key} takes a whole number of 1 or more, not {value}.")
    # Divisions may leave a remainder, as in DeepSpeed. The check at the end finds it.
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
