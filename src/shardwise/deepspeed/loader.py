"""Implements the loader of `training_data`, and a loader that repeats another one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

import shardwise as sw
from shardwise.errors import UsageError

_BESIDE_AN_ACCELERATOR = 2
"""Default number of DataLoader workers if an accelerator computes and the CPU is idle."""


class DeepSpeedDataLoader:
    """Loads this worker's share of a dataset, in batches of `batch_size`.

    The dataset is divided in the same way as by torch's DistributedSampler. As in DeepSpeed, the
    shuffled order is the same in every epoch.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        world: sw.World,
        *,
        shuffle: bool = True,
        pin_memory: bool = True,
        sampler: Any = None,
        collate_fn: Any = None,
        workers: int | None = None,
        drop_last: bool = False,
    ) -> None:
        iterable = isinstance(dataset, IterableDataset)
        if not iterable and not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
            raise UsageError(
                f"training_data must be a torch Dataset with a length, or an IterableDataset, not "
                f"{type(dataset).__name__}."
            )
        if sampler is None and not iterable:
            sampler = DistributedSampler(
                dataset, num_replicas=world.data_size, rank=world.data_rank, shuffle=shuffle
            )
        on_accelerator = world.device.type != "cpu"
        default = _BESIDE_AN_ACCELERATOR if on_accelerator else 0
        self.dataset, self.batch_size, self.data_sampler = dataset, batch_size, sampler
        self.dataloader: DataLoader[Any] = DataLoader(
            dataset,
            batch_size=batch_size,
            sampler=sampler,
            collate_fn=collate_fn,
            pin_memory=pin_memory and on_accelerator,
            num_workers=default if workers is None else workers,
            drop_last=drop_last,
        )
        self._batches: Iterator[Any] | None = None

    def __len__(self) -> int:
        return len(self.dataloader)

    def __iter__(self) -> Iterator[Any]:
        self._batches = iter(self.dataloader)
        return self

    def __next__(self) -> Any:
        if self._batches is None:
            self._batches = iter(self.dataloader)
        return next(self._batches)


class RepeatingLoader:
    """Iterates over `loader` endlessly, restarting it each time it is exhausted."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.data_iter = iter(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)
