"""Shares loaders among the ranks: training data in its order, an evaluation without repetitions.

Lightning's sampler repeats samples until every rank has the same number. With exact_mean=True a
batch to train on drops them (bridging/exact_mean.py). An evaluation always does:

    5 samples, 2 ranks, batches of 2    Lightning  0 2 | 4    and  1 3 | 0
                                        here       0 2 | 4    and  1 3
    with batches of 1                   Lightning  0 | 2 | 4  and  1 | 3 | 0
                                        here       0 | 2 4    and  1 | 3

Every rank makes the same number of forwards, so that collectives inside a step match. If a rank
with one sample more would need one batch more, its last batch is longer instead.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
)

from shardwise.bridging.exact_mean import CountedBatch, CountedBatches, ItemsOf
from shardwise.errors import UsageError


class Marked(int):
    """The number of workers, as Lightning passes it to its samplers. The type tells these samplers
    from those that the script has made."""


def share_in_order(connector: Any, workers: int) -> None:
    """Make `connector`, which puts samplers into the loaders of a Trainer, keep their order.

    Lightning shuffles every loader that it shares out to train on. Here only `shuffle=True`
    shuffles: a sampler of the script, such as a curriculum, gives the order, as in one process.
    With one worker nothing is shared out, and loaders stay as they are.
    """
    needed, resolve = connector._requires_distributed_sampler, connector._resolve_sampler
    if "_resolve_sampler" in vars(connector):
        return

    def resolve_in_order(dataloader: Any, shuffle: bool, mode: Any = None) -> Any:
        shuffle = shuffle and isinstance(dataloader.sampler, RandomSampler)
        with warnings.catch_warnings():
            # Lightning warns of samples that count twice, which `count_once` prevents.
            warnings.filterwarnings("ignore", message="Using `DistributedSampler`")
            return resolve(dataloader, shuffle=shuffle, mode=mode)

    connector._requires_distributed_sampler = lambda loader: workers > 1 and needed(loader)
    connector._resolve_sampler = resolve_in_order


def count_once(loader: Any) -> Any:
    """Return `loader`, of an evaluation, without the repetitions of Lightning's sampler."""
    sampler = getattr(loader, "sampler", None)
    batches = getattr(loader, "batch_sampler", None)
    if not isinstance(loader, DataLoader) or not isinstance(sampler, DistributedSampler):
        return loader
    total = len(sampler.dataset)  # type: ignore[arg-type]
    fits = total % sampler.num_replicas == 0
    if not isinstance(sampler.num_replicas, Marked) or type(batches) is not BatchSampler or fits:
        return loader
    if batches.drop_last or total < sampler.num_replicas:
        return loader  # a rank without a sample would make no forward: one is repeated there
    # DataLoader refuses to set attributes that it was made with; it has begun nothing yet.
    object.__setattr__(loader, "batch_sampler", EvenBatches(sampler, batches.batch_size, total))
    return loader


class EvenBatches(BatchSampler):
    """Batches of an evaluation: this rank's rows of `sampler` without repetitions. The last batch
    may have one row more than `batch_size`."""

    def __init__(self, sampler: DistributedSampler[Any], batch_size: int, total: int) -> None:
        super().__init__(sampler, batch_size, drop_last=False)
        self._count = own_share(sampler)
        self._batches = -(-(total // sampler.num_replicas) // batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        rows = list(self.sampler)[: self._count]
        for number in range(self._batches):
            last = number == self._batches - 1
            start = number * self.batch_size
            yield rows[start:] if last else rows[start : start + self.batch_size]

    def __len__(self) -> int:
        return int(self._batches)


def own_share(sampler: DistributedSampler[Any]) -> int:
    """Return how many of the first rows that `sampler` gives its rank are no repetitions."""
    total = len(sampler.dataset)  # type: ignore[arg-type]
    return len(range(sampler.rank, total, sampler.num_replicas))


# -- exact means ----------------------------------------------------------------------------------


class LoadedBatches(CountedBatches):
    """Drops repeated samples from training loaders, and weighs the losses of their batches.

    `is_training` returns, as a loader begins, whether its batches are for training.
    """

    def __init__(
        self, call: str, items_of: ItemsOf | None, is_training: Callable[[], bool]
    ) -> None:
        super().__init__("loader that was set up", call, items_of)
        self._is_training = is_training

    def watch(self, loader: Any) -> Any:
        """Return a copy of `loader` whose batches have no repeated samples and are counted.

        A stream is returned as it is, because each worker reads its own.
        """
        if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
            return loader
        sampler: Any = getattr(loader.batch_sampler, "sampler", loader.sampler)
        is_shared = isinstance(sampler, DistributedSampler) and isinstance(
            sampler.num_replicas, Marked
        )
        share: TrainBatches | None = None
        if is_shared and len(sampler.dataset) % sampler.num_replicas != 0:
            batches = loader.batch_sampler
            if type(batches) is not BatchSampler:
                kind = "no batches" if batches is None else type(batches).__name__
                raise UsageError(
                    f"exact_mean=True, and {len(sampler.dataset)} samples are shared out to "
                    f"{sampler.num_replicas} workers by a loader with {kind}: which ones Lightning "
                    "repeats to fill it cannot be told. Write DataLoader(dataset, batch_size=...), "
                    "or share the samples out yourself and set up the loader with "
                    "use_distributed_sampler=False."
                )
            share = TrainBatches(batches, sampler, self._is_training)
        watched: Any = copy.copy(loader)  # the script may use its own for something else
        stock: Any = type(loader)

        def iterate(this: Any) -> Iterator[Any]:
            return self.iterate(
                this, stock.__iter__(this), lambda number, batch: self._count(share, number, batch)
            )

        # One base class only: the object layout stays, so Python allows the change of class.
        watched.__class__ = type(stock.__name__, (stock,), {"__iter__": iterate})
        if share is not None:
            # DataLoader refuses to set attributes that it was made with; it has begun nothing yet.
            object.__setattr__(watched, "batch_sampler", share)
        return watched

    def _count(
        self, share: TrainBatches | None, number: int, batch: Any
    ) -> tuple[Any, CountedBatch]:
        self.last_rows, rows = batch, _rows_or_one(batch)
        return batch, CountedBatch(rows, False) if share is None else share.counted(number, rows)

    def compute_with(self, batch: Any) -> None:
        """Take `batch` as the one that the next loss is computed from. A Trainer may have read one
        batch of a stream ahead."""
        self.last_rows = batch
        if not self.is_open:
            self.last = CountedBatch(_rows_or_one(batch), is_cut=False)

    def batch_of_loss(self) -> CountedBatch:
        """Return the batch that a loss is computed from. Raises UsageError also if its rows are not
        its samples, or it has none."""
        batch, rows = super().batch_of_loss(), next(_row_counts(self.last_rows), None)
        if self.items_of is not None:
            return batch
        if rows is None:
            raise UsageError(
                "exact_mean=True: a batch has no tensor with rows, so how many samples its loss is "
                "a mean over cannot be told. Say what it counts: exact_mean=lambda batch: ..."
            )
        if batch.samples in (0, rows):
            return batch
        raise UsageError(
            f"exact_mean=True: a batch of {batch.samples} samples has a first tensor of {rows} "
            "rows, so how much its loss weighs cannot be told. Let collate_fn give a row for each "
            "sample, or say what the loss is a mean over: exact_mean=lambda batch: ..."
        )


class TrainBatches(BatchSampler):
    """Batches to train on: this rank's rows of `sampler` without repetitions. A batch of repeated
    samples alone stays whole, because the other ranks make a forward too.

    `cuts` returns, as an iteration begins, whether repetitions are dropped.
    """

    def __init__(
        self, stock: BatchSampler, sampler: DistributedSampler[Any], cuts: Callable[[], bool]
    ) -> None:
        super().__init__(sampler, stock.batch_size, stock.drop_last)
        self._own = own_share(sampler)
        self._cuts = cuts
        self._is_cut = False

    def __iter__(self) -> Iterator[list[int]]:
        rows, self._is_cut = list(self.sampler), self._cuts()
        for number in range(len(self)):
            part = rows[number * self.batch_size :][: self.batch_size]
            yield part[: self._samples(number) or None] if self._is_cut else part

    def _samples(self, number: int) -> int:
        return min(max(self._own - number * self.batch_size, 0), self.batch_size)

    def counted(self, number: int, rows: int) -> CountedBatch:
        """Return the counts of batch `number`, which has `rows`."""
        samples = self._samples(number)
        if self._is_cut:
            return CountedBatch(samples, is_cut=samples == 0)
        return CountedBatch(rows, is_cut=False, has_repeated=samples < rows)


def _rows_or_one(batch: Any) -> int:
    """Return the rows of the first tensor; 1 for a batch without rows, which is not empty."""
    return next(_row_counts(batch), 1)


def _row_counts(value: Any) -> Iterator[int]:
    """Yield the rows of each tensor in a nest."""
    if isinstance(value, Tensor):
        if value.ndim:
            yield len(value)
    elif isinstance(value, Mapping):
        yield from _row_counts(list(value.values()))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _row_counts(each)
    elif hasattr(value, "__dataclass_fields__"):
        yield from _row_counts([getattr(value, name) for name in value.__dataclass_fields__])
