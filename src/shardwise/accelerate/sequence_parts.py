"""Accelerate's loaders, schedules and gathers if sequences are split across ranks (`--context`)."""

from __future__ import annotations

from typing import Any

from accelerate.scheduler import AcceleratedScheduler
from torch import Tensor
from torch.utils.data import IterableDataset

import shardwise as sw
from shardwise.errors import UsageError


def check_loader(loader: Any, dispatches: bool | None, world: sw.World) -> None:
    """Raise UsageError if rank 0 would read the batches of `loader` for all ranks."""
    is_default = dispatches is None and isinstance(loader.dataset, IterableDataset)
    if dispatches or is_default:
        raise UsageError(
            f"--context {world.context_size}: the loader's batches would be read by worker 0 and "
            "divided among all workers (dispatch_batches), but the workers of a context group need "
            "the same samples. Let each worker read its samples: write "
            "DataLoaderConfiguration(dispatch_batches=False), or in TrainingArguments "
            'accelerator_config={"dispatch_batches": False}.'
        )


def synchronise_order(loader: Any, world: sw.World) -> None:
    """Make the ranks draw the same order of samples if all of them read the same samples."""
    # With several groups, Accelerate synchronises the sampler's generator instead.
    if world.data_size == 1 and "torch" not in (kinds := loader.rng_types or []):
        loader.rng_types = [*kinds, "torch"]


class GroupScheduler(AcceleratedScheduler):
    """Steps a schedule once per context group, because a group shares its samples.

    Accelerate steps it once per process.
    """

    groups: int
    split_batches: bool

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step the schedule, unless the optimizer has not been stepped."""
        is_linked = self.step_with_optimizer and self.gradient_state.sync_gradients
        times = 1 if self.split_batches or not is_linked else self.groups
        before, self.split_batches = self.split_batches, True  # Accelerate then steps once
        try:
            for _ in range(times):
                # Accelerate's own check for schedules of a fixed length, such as OneCycleLR.
                steps = getattr(self.scheduler, "total_steps", None)
                if times == 1 or steps is None or self.scheduler._step_count <= steps:
                    super().step(*args, **kwargs)
        finally:
            self.split_batches = before


def counted_once(gathered: Tensor, world: sw.World) -> Tensor:
    """Return the rows of one rank per context group.

    Args:
        gathered: The rows of all ranks, in the order of the ranks.
        world: The run.
    """
    each = gathered.size(0) // world.size
    rows = gathered.view(-1, world.context_size, each, *gathered.shape[1:])
    return rows[:, 0].flatten(0, 1)
