"""Shares loaders between ranks. Training data keeps its order, and evaluations repeat no samples.

Lightning's sampler repeats samples until every rank has the same number. With exact_mean=True,
training batches drop the repeated samples (bridging/exact_mean.py). Evaluations always drop them:

    5 samples, 2 ranks, batches of 2    Lightning  0 2 | 4    and  1 3 | 0
                                        here       0 2 | 4    and  1 3
    with batches of 1                   Lightning  0 | 2 | 4  and  1 | 3 | 0
                                        here       0 | 2 4    and  1 | 3

Every rank runs the same number of forward passes, so that collectives inside a step match. A rank
that has one sample more than others therefore gets a longer last batch rather than an additional
one.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
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
from shardwise.bridging.sequence_batches import SequenceBatches
from shardwise.bridging.trained_engine import trained_engines
from shardwise.errors import UsageError


class LightningShare(int):
    """The number of workers in the samplers that Lightning creates.

    The type of this number distinguishes Lightning's samplers from the script's own.
    """


def share_in_order(connector: Any, workers: int) -> None:
    """Make `connector` keep the order of a Trainer's loaders when it replaces their samplers.

    Stock Lightning shuffles every training loader that it divides among workers. Here, only
    `shuffle=True` shuffles. A custom sampler, such as a curriculum, keeps its order, as in a single
    process. With one worker, loaders are not changed.
    """
    needed, resolve = connector._requires_distributed_sampler, connector._resolve_sampler
    if "_resolve_sampler" in vars(connector):
        return

    def resolve_in_order(dataloader: Any, shuffle: bool, mode: Any = None) -> Any:
        shuffle = shuffle and isinstance(dataloader.sampler, RandomSampler)
        with warnings.catch_warnings():
            # Lightning warns about samples that count twice, which `count_once` prevents.
            warnings.filterwarnings("ignore", message="Using `DistributedSampler`")
            return resolve(dataloader, shuffle=shuffle, mode=mode)

    connector._requires_distributed_sampler = lambda loader: workers > 1 and needed(loader)
    connector._resolve_sampler = resolve_in_order


def count_once(loader: Any) -> Any:
    """Remove the samples that Lightning's sampler repeats from the evaluation loader `loader`.

    Returns `loader`.
    """
    sampler = getattr(loader, "sampler", None)
    batches = getattr(loader, "batch_sampler", None)
    if not isinstance(loader, DataLoader) or not isinstance(sampler, DistributedSampler):
        return loader
    total = len(sampler.dataset)  # type: ignore[arg-type]
    fits = total % sampler.num_replicas == 0
    if (
        not isinstance(sampler.num_replicas, LightningShare)
        or type(batches) is not BatchSampler
        or fits
    ):
        return loader
    if batches.drop_last or total < sampler.num_replicas:
        return loader  # with fewer samples than ranks, some rank would have no forward pass to run
    # DataLoader rejects setting this attribute. It is safe, because no iteration has begun.
    object.__setattr__(loader, "batch_sampler", EvenBatches(sampler, batches.batch_size, total))
    return loader


class EvenBatches(BatchSampler):
    """Evaluation batches: this rank's rows of `sampler`, without repeated rows.

    The last batch may have one row more than `batch_size`.
    """

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
    """Return the number of rows that `sampler` yields before it repeats samples."""
    total = len(sampler.dataset)  # type: ignore[arg-type]
    return len(range(sampler.rank, total, sampler.num_replicas))


# -- exact means ----------------------------------------------------------------------------------


class LoadedBatches(CountedBatches):
    """Drops repeated samples from training loaders, and weights the losses of their batches.

    `is_training` is called at the start of each iteration over a loader, and returns whether that
    iteration is for training.
    """

    def __init__(
        self, call: str, items_of: ItemsOf | None, is_training: Callable[[], bool]
    ) -> None:
        super().__init__("loader that was set up", call, items_of)
        self._is_training = is_training
        self._sequences: SequenceBatches | None = None

    def split(self, sequences: SequenceBatches, *, splits_on_read: bool) -> None:
        """Read weights from losses, because sequences are split (`--context`).

        `splits_on_read` is True to split the batches of all loaders when they are read.
        """
        self.reads_loss = True
        self._sequences = sequences if splits_on_read else None

    def watch(self, loader: Any) -> Any:
        """Return a copy of `loader` that counts its batches and drops repeated samples.

        A stream is returned unchanged, because each worker reads its own stream. With `--context`,
        the workers of a group read the same stream.
        """
        is_stream = isinstance(getattr(loader, "dataset", None), IterableDataset)
        if not isinstance(loader, DataLoader) or (is_stream and self._sequences is None):
            return loader
        sampler: Any = getattr(loader.batch_sampler, "sampler", loader.sampler)
        is_shared = isinstance(sampler, DistributedSampler) and isinstance(
            sampler.num_replicas, LightningShare
        )
        share: TrainBatches | None = None
        if is_shared and len(sampler.dataset) % sampler.num_replicas != 0:
            batches = loader.batch_sampler
            if type(batches) is not BatchSampler:
                kind = "no batches" if batches is None else type(batches).__name__
                raise UsageError(
                    "exact_mean=True cannot recognize the samples that Lightning repeats to share "
                    f"{len(sampler.dataset)} samples among {sampler.num_replicas} workers, because "
                    f"they come from a loader with {kind}. Write DataLoader(dataset, "
                    "batch_size=...), or share the samples yourself and set up the loader with "
                    "use_distributed_sampler=False."
                )
            share = TrainBatches(batches, sampler, self._is_training)
        watched: Any = copy.copy(loader)  # the script may use the original for something else
        stock: Any = type(loader)

        def iterate(this: Any) -> Iterator[Any]:
            return self.iterate(
                this, stock.__iter__(this), lambda number, batch: self._count(share, number, batch)
            )

        # Python allows changing the class, because a single base class leaves the object layout
        # unchanged.
        watched.__class__ = type(stock.__name__, (stock,), {"__iter__": iterate})
        if share is not None:
            # DataLoader rejects setting this attribute. It is safe, because no iteration has begun.
            object.__setattr__(watched, "batch_sampler", share)
        return watched

    def _count(
        self, share: TrainBatches | None, number: int, batch: Any
    ) -> tuple[Any, CountedBatch]:
        rows = _rows_or_one(batch)
        counted = CountedBatch(rows, False) if share is None else share.counted(number, rows)
        if self._sequences is not None and trained_engines():
            part = self._sequences.split(batch)
            training = self._is_training()
            batch = self._sequences.show(part, counted.samples, training=training)
            counted = replace(counted, is_evaluated=not training)
        self.last_rows = batch
        return batch, counted

    def set_current_batch(self, batch: Any) -> None:
        """Declare that the next loss is computed from `batch`."""
        # A Trainer may have prefetched one batch, so the last batch that was read may be the next
        # one.
        self.last_rows = batch
        if not self.is_open:
            self.last = CountedBatch(_rows_or_one(batch), is_cut=False)

    def batch_of_loss(self) -> CountedBatch:
        """Return the batch from which the current loss was computed.

        Raises UsageError in the same cases as the base class, and if the batch's rows are not its
        samples.
        """
        batch, rows = super().batch_of_loss(), next(_row_counts(self.last_rows), None)
        if self.items_of is not None:
            return batch
        if rows is None:
            raise UsageError(
                "exact_mean=True cannot count the samples of a batch without a tensor that has "
                "rows. Pass a function that counts them: exact_mean=lambda batch: ..."
            )
        if batch.samples in (0, rows):
            return batch
        raise UsageError(
            f"exact_mean=True cannot determine the weight of a loss: a batch of {batch.samples} "
            f"samples has a first tensor of {rows} rows. Make collate_fn return one row per "
            "sample, or pass a function that counts the items: exact_mean=lambda batch: ..."
        )


class TrainBatches(BatchSampler):
    """Training batches: this rank's rows of `sampler`, without repeated rows.

    A batch that contains only repeated samples is left unchanged, because the other ranks run a
    forward pass too. `cuts` is called at the start of each iteration, and returns whether to drop
    repeated samples.
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
        """Return the counts of batch `number`, which has `rows` rows."""
        samples = self._samples(number)
        if self._is_cut:
            return CountedBatch(samples, is_cut=samples == 0)
        return CountedBatch(rows, is_cut=False, has_repeated=samples < rows)


def _rows_or_one(batch: Any) -> int:
    """Return the number of rows of the first tensor in `batch`, or 1 if it contains no tensor."""
    return next(_row_counts(batch), 1)


def _row_counts(value: Any) -> Iterator[int]:
    """Yield the number of rows of each tensor in a nested structure of containers."""
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
