"""Computes missing batch sizes in a DeepSpeed config: total = micro-batch x steps x workers."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.errors import ConfigError
from shardwise.messages.printable import many

TOTAL = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
STEPS = "gradient_accumulation_steps"


@dataclass(frozen=True, kw_only=True)
class Batches:
    """The three batch sizes of a DeepSpeed config.

    Args:
        total: The number of samples per step, across all workers.
        micro: The number of samples per backward pass on a worker.
        steps: The number of backward passes per optimizer step.
    """

    total: int
    micro: int
    steps: int


def solve(
    total: int | None, micro: int | None, steps: int | None, workers: int, name: str
) -> Batches:
    """Compute the missing batch sizes by DeepSpeed's rules.

    Args:
        total: The total batch size, or None if it is missing from the config.
        micro: The micro-batch size, or None if it is missing.
        steps: The number of accumulation steps, or None if it is missing.
        workers: The number of data-parallel workers.
        name: The config's name for messages.

    Raises:
        ConfigError: The sizes do not satisfy total = micro x steps x workers.
    """
    if total is None and micro is None:
        raise ConfigError(f"{name}: the batch size is missing. Give {TOTAL} or {MICRO}.")
    sizes = ((TOTAL, total), (MICRO, micro), (STEPS, steps))
    for key, value in sizes:
        if value is not None and value < 1:
            raise ConfigError(f"{name}: {key} takes an integer of 1 or more, not {value}.")
    # As in DeepSpeed, divisions may leave a remainder. The check at the end detects it.
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
            f"{name}: {given} {verb} not multiply out on {many(workers, 'worker')}: {TOTAL} is "
            f"{MICRO} x {STEPS} x workers, and {micro} x {steps} x {workers} is "
            f"{micro * steps * workers}. Change one, or the number of workers."
        )
    return Batches(total=total, micro=micro, steps=steps)
