"""Lets every sample count once and alike, with `exact_mean=True`, where Accelerate's means do not.

Accelerate fills the last batches of an epoch with samples of its beginning, so that all workers
have as many: those are cut off again here, in training. A worker that has nothing but such samples
makes its forwards with them, and they weigh nothing.

    10 samples, batches of 4, 2 workers      worker 0       worker 1
    the last batches of Accelerate           8 9 0 1        2 3 4 5
    here                                     8 9            2 3 4 5, of weight 0
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from accelerate.data_loader import BatchSamplerShard, DataLoaderDispatcher
from accelerate.utils import find_batch_size, honor_type
from torch import Tensor

import shardwise as sw
from shardwise.bridging.given_batches import Given, GivenBatches
from shardwise.errors import UsageError


class ExactBatches(GivenBatches):
    """Cuts the batches of prepared loaders, and knows how many samples the last one has.

    `is_training` says whether a batch that is handed out now is to train on: those of an evaluation
    stay as they are, for gather_for_metrics.
    """

    def __init__(self, world: sw.World, is_training: Callable[[], bool]) -> None:
        super().__init__("prepared loader", "accelerator.backward")
        self._world = world
        self._is_training = is_training

    def watch(self, loader: Any) -> Any:
        """`loader`, as Accelerate has prepared it, whose batches are cut and counted."""
        kind: type[Any] = type(loader)
        if not issubclass(kind, _Exact) and hasattr(kind, "end_of_dataloader"):
            # Its class tells others a DataLoader's name, as a property without a setter.
            new = type(kind.__name__, (_Exact, kind), {})
            object.__dict__["__class__"].__set__(loader, new)
            loader._exact_batches = self
        return loader

    def batches(self, loader: Any, found: Iterator[Any]) -> Iterator[Any]:
        """The batches of `found`, an iteration over `loader`."""
        try:
            for batch in found:
                shown, given = last_batch(loader, batch, self._world, cuts=self._is_training())
                self.note(loader, given)
                yield shown
        finally:
            self.end(loader)


class _Exact:
    """What stands before the class of a prepared loader."""

    _exact_batches: ExactBatches

    def __iter__(self) -> Iterator[Any]:
        return self._exact_batches.batches(self, super().__iter__())  # type: ignore[misc]


def last_batch(loader: Any, batch: Any, world: sw.World, *, cuts: bool) -> tuple[Any, Given]:
    """`batch`, the last one that `loader` gave, without rows that count nothing where it `cuts`
    them; and how many count."""
    rows = find_batch_size(batch)
    samples = own_samples(loader, rows, world) if loader.end_of_dataloader else rows
    if samples == rows or not cuts:
        return batch, Given(samples, is_cut=False, has_repeated=samples < rows)
    return (_cut(batch, rows, samples) if samples else batch), Given(samples, is_cut=True)


def own_samples(loader: Any, rows: int, world: sw.World) -> int:
    """How many of the `rows` that this rank's last batch of `loader` has are no repetitions.

    Those are the last rows of the last ranks. Of an IterableDataset that each worker reads by
    itself (dispatch_batches=False) it cannot be told: all are taken for samples, which is said.
    """
    if world.size == 1:
        return rows
    if isinstance(loader, DataLoaderDispatcher):
        return _part(loader.remainder, rows, world.rank)
    shard, sampler = _samplers(loader)
    if shard is None:
        world.say_once(
            "exact_mean=True cannot see which samples of an IterableDataset are repeated at its "
            "end with dispatch_batches=False: they count again."
        )
        return rows
    if not shard.even_batches or shard.drop_last:
        return rows
    size = getattr(sampler, "batch_size", None)
    if size is None:  # whole batches are repeated
        left = len(sampler) % world.size
        return rows if left == 0 or world.rank < left else 0
    each = size // world.size if shard.split_batches else size
    if rows != each:
        raise UsageError(
            f"exact_mean=True: a batch of {each} samples has a first tensor of {rows} rows, so "
            "which rows are repeated samples cannot be told. Let collate_fn give a row for each "
            "sample, or write DataLoader(..., drop_last=True)."
        )
    left = len(sampler.sampler) % (each * world.size)
    return _part(left, each, world.rank) if left else rows


def _part(total: int, each: int, rank: int) -> int:
    """How many of the first `total` rows belong to `rank`, which has `each` of a batch."""
    return min(max(total - rank * each, 0), each)


def _samplers(loader: Any) -> tuple[Any, Any]:
    """What gives this rank its batches of `loader`, and the sampler of all batches; None without
    the first."""
    found = loader.batch_sampler
    while found is not None and not isinstance(found, BatchSamplerShard):
        found = getattr(found, "batch_sampler", None)
    return found, getattr(found, "batch_sampler", None)


def _cut(data: Any, rows: int, first: int) -> Any:
    """The `first` of the `rows` that a nest of tensors and columns has."""
    if isinstance(data, Tensor):
        return data[:first] if data.ndim and len(data) == rows else data
    if isinstance(data, Mapping):
        return type(data)({name: _cut(each, rows, first) for name, each in data.items()})  # type: ignore[call-arg]
    if isinstance(data, tuple | list):
        if any(isinstance(each, Tensor | Mapping | tuple | list) for each in data):
            return honor_type(data, (_cut(each, rows, first) for each in data))
        return data[:first] if len(data) == rows else data
    return data
