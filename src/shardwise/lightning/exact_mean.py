"""Lets every sample count once and alike, with `exact_mean=True`, where Lightning's means do not.

Lightning repeats samples until all workers have as many: those are left out here, in training. A
worker whose last batch would have no other ones makes its forward with them, and it weighs nothing.

    9 samples, batches of 2, 2 workers     worker 0         worker 1
    the batches of Lightning               0 2 | 4 6 | 8    1 3 | 5 7 | 0
    here                                   0 2 | 4 6 | 8    1 3 | 5 7 | 0, of weight 0
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from shardwise.bridging.given_batches import Given, GivenBatches
from shardwise.bridging.trained_engine import LossItems
from shardwise.errors import UsageError
from shardwise.lightning.sharing import Marked, own_share

ItemsOf = Callable[[Any], Any]
"""The number of items that the loss of a batch is a mean over."""


class ExactMean(GivenBatches):
    """Leaves repeated samples out of loaders, and knows what the batch of a loss weighs.

    `items_of` counts the items of a batch, where they are not its samples. `is_training` says, as a
    loader begins, whether its batches are to train on: those of an evaluation stay as they are.
    """

    def __init__(self, call: str, items_of: ItemsOf | None, is_training: Callable[[], bool]):
        super().__init__("loader that was set up", call)
        self._items_of = items_of
        self._is_training = is_training
        self._batch: Any = None
        """What `items_of` is asked about."""

    def watch(self, loader: Any) -> Any:
        """`loader`, a copy, whose batches have no repeated samples and are counted.

        A stream is left as it is: each worker reads its own.
        """
        if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
            return loader
        watched: Any = copy.copy(loader)  # the script may use its own for something else
        watched.__class__ = _counted(type(loader))
        watched._exact_mean, watched._share = self, None
        if _repeats(loader):
            watched._share = _share(loader, self._is_training)
            # DataLoader refuses the change of what it was made with; it has begun nothing yet.
            object.__setattr__(watched, "batch_sampler", watched._share)
        return watched

    def batches(self, loader: Any, share: OwnBatches | None, found: Iterator[Any]) -> Iterator[Any]:
        """The batches of `found`, an iteration over `loader`, of which this rank has `share`."""
        try:
            for number, batch in enumerate(found):
                rows = _rows_or_one(batch)
                given = Given(rows, False) if share is None else share.given(number, rows)
                self._batch = batch
                self.note(loader, given)
                yield batch
        finally:
            self.end(loader)

    def computes_with(self, batch: Any) -> None:
        """`batch` is computed with now: of a stream, whose loader may be ahead by one."""
        self._batch = batch
        if not self.is_open:
            self.last = Given(_rows_or_one(batch), is_cut=False)

    def items(self, number: float | Tensor | None, same_items: bool | None) -> LossItems:
        """As GivenBatches; what a script counts by a function takes the place of samples."""
        if number is not None or self._items_of is None:
            return super().items(number, same_items)
        batch = self.of_loss()
        counted = self._items_of(self._batch) if batch.samples else 0.0
        return LossItems(counted, batch, same_items, rows=batch.samples)

    def of_loss(self) -> Given:
        """As GivenBatches; raises UsageError where a batch has no rows, or others than samples."""
        given, rows = super().of_loss(), _rows(self._batch)
        if self._items_of is not None:
            return given
        if rows is None:
            raise UsageError(
                "exact_mean=True: a batch has no tensor with rows, so how many samples its loss is "
                "a mean over cannot be told. Say what it counts: exact_mean=lambda batch: ..."
            )
        if given.samples in (0, rows):
            return given
        raise UsageError(
            f"exact_mean=True: a batch of {given.samples} samples has a first tensor of {rows} "
            "rows, so how much its loss weighs cannot be told. Let collate_fn give a row for each "
            "sample, or say what the loss is a mean over: exact_mean=lambda batch: ..."
        )


def _counted(kind: Any) -> Any:
    """`kind`, a class of loaders, whose objects say what they give."""

    def iterate(self: Any) -> Iterator[Any]:
        return self._exact_mean.batches(self, self._share, kind.__iter__(self))  # type: ignore[no-any-return]

    # One base: the layout of objects stays, so that theirs can be changed to it.
    return type(kind.__name__, (kind,), {"__iter__": iterate})


class OwnBatches(BatchSampler):
    """This rank's share in the batches that Lightning has made, without repeated samples; a batch
    that has no other ones is whole.

    `sampler` gives this rank's rows, of which `own` are no repetitions: the first ones.
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

    def given(self, number: int, rows: int) -> Given:
        """What batch `number`, of `rows`, counts."""
        samples = self._samples(number)
        if self._is_cut:
            return Given(samples, is_cut=samples == 0)
        return Given(rows, is_cut=False, has_repeated=samples < rows)


def _repeats(loader: DataLoader[Any]) -> bool:
    """Whether Lightning has given `loader` a sampler that repeats samples on some ranks."""
    sampler = _sampler(loader)
    if sampler is None:
        return False
    return len(sampler.dataset) % sampler.num_replicas != 0  # type: ignore[arg-type]


def _sampler(loader: DataLoader[Any]) -> DistributedSampler[Any] | None:
    found: Any = getattr(loader.batch_sampler, "sampler", loader.sampler)
    ours = isinstance(found, DistributedSampler) and isinstance(found.num_replicas, Marked)
    return found if ours else None


def _share(loader: DataLoader[Any], cuts: Callable[[], bool]) -> OwnBatches:
    batches, sampler = loader.batch_sampler, _sampler(loader)
    assert sampler is not None
    if type(batches) is not BatchSampler:
        kind = "no batches" if batches is None else type(batches).__name__
        raise UsageError(
            f"exact_mean=True, and {len(sampler.dataset)} samples are shared out to "  # type: ignore[arg-type]
            f"{sampler.num_replicas} workers by a loader with {kind}: which ones Lightning repeats "
            "to fill it cannot be told. Write DataLoader(dataset, batch_size=...), or share the "
            "samples out yourself and set up the loader with use_distributed_sampler=False."
        )
    return OwnBatches(batches, sampler, cuts)


def _rows(batch: Any) -> int | None:
    """The rows of the first tensor in a nest that has some; None without one."""
    return next(_found(batch), None)


def _rows_or_one(batch: Any) -> int:
    """The same, where a batch without rows is something all the same: it is asked about later."""
    rows = _rows(batch)
    return 1 if rows is None else rows


def _found(value: Any) -> Iterator[int]:
    if isinstance(value, Tensor):
        if value.ndim:
            yield len(value)
    elif isinstance(value, Mapping):
        yield from _found(list(value.values()))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _found(each)
    elif hasattr(value, "__dataclass_fields__"):
        yield from _found([getattr(value, name) for name in value.__dataclass_fields__])
