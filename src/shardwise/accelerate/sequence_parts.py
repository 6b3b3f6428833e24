"""Accelerate's loaders, schedules and gathers if sequences are split across ranks (`--context`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from accelerate.scheduler import AcceleratedScheduler
from torch import Tensor
from torch.utils.data import IterableDataset, RandomSampler, SequentialSampler

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
    if world.data_size > 1:
        return
    sampler = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    if type(sampler) is RandomSampler and sampler.generator is None:
        sampler.__class__, sampler.world = OrderOfFirstRank, world  # type: ignore[attr-defined]
    elif type(sampler) not in (OrderOfFirstRank, SequentialSampler):
        # It may draw from torch's generator, which the ranks then share, also for dropout.
        kinds = loader.rng_types or []
        loader.rng_types = kinds if "torch" in kinds else [*kinds, "torch"]


class OrderOfFirstRank(RandomSampler):
    """Draws the order of samples from the generator of the first rank of the context group.

    The order is that of a single process. The other ranks' generators stay their own, so that
    dropout draws different numbers for different tokens.
    """

    world: sw.World

    def __iter__(self) -> Iterator[int]:
        # As in RandomSampler, but all ranks use the same seed.
        seed = int(torch.empty((), dtype=torch.int64).random_().item())
        self.generator = torch.Generator()
        self.generator.manual_seed(self.world.context.gather_plain(seed)[0])
        try:
            yield from super().__iter__()
        finally:
            self.generator = None


def say_length(scheduler: AcceleratedScheduler, world: sw.World) -> None:
    """Say how often `scheduler` advances, because scripts compute its length from it."""
    if scheduler.step_with_optimizer and not scheduler.split_batches:
        times = "once" if world.data_size == 1 else f"{world.data_size} times"
        world.say_once(
            f"the prepared schedule advances {times} per step of the optimizer, because a context "
            f"group counts once (--context {world.context_size}). If the script multiplies its "
            "number of steps by accelerator.num_processes, write accelerator.num_processes // "
            f"{world.context_size}"
        )


class GroupScheduler(AcceleratedScheduler):
    """Steps a schedule once per context group, because a group shares its samples.

    Accelerate steps it once per process.
    """

    groups: int
    split_batches: bool

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step the schedule, unless the optimizer has not been stepped."""
        is_linked = self.step_with_optimizer and self.gradient_state.sync_gradients
        is_per_group = is_linked and not self.split_batches
        before, self.split_batches = self.split_batches, True  # Accelerate then steps once
        try:
            for _ in range(self.groups if is_per_group else 1):
                # Accelerate's own check for schedules of a fixed length, such as OneCycleLR.
                steps = getattr(self.scheduler, "total_steps", None) if is_per_group else None
                if steps is None or self.scheduler._step_count <= steps:
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
