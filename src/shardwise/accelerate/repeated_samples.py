"""Finds the samples that Accelerate repeats to fill the last batches of an epoch.

10 samples, batches of 4, 2 workers      worker 0       worker 1
the last batches of Accelerate           8 9 0 1        2 3 4 5
with exact_mean=True                     8 9            2 3 4 5, of weight 0
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from accelerate.data_loader import BatchSamplerShard, DataLoaderDispatcher
from accelerate.utils import find_batch_size, honor_type
from torch import Tensor

import shardwise as sw
from shardwise.bridging.exact_mean import CountedBatch, CountedBatches
from shardwise.bridging.sequence_batches import SequenceBatches
from shardwise.bridging.trained_engine import trained_engines
from shardwise.errors import UsageError


class PreparedBatches(CountedBatches):
    """Drops repeated rows from the batches of prepared loaders.

    `is_training` returns whether the next batch is a training batch. Evaluation batches keep
    repeated rows, because gather_for_metrics expects them and drops them. `sequences` splits the
    sequences of all batches, if an engine will exchange their tokens.
    """

    def __init__(
        self,
        world: sw.World,
        is_training: Callable[[], bool],
        sequences: SequenceBatches | None = None,
    ) -> None:
        super().__init__("prepared loader", "accelerator.backward")
        self._world = world
        self._is_training = is_training
        self._sequences, self.reads_loss = sequences, sequences is not None

    def watch(self, loader: Any) -> Any:
        """Make the prepared `loader` count its batches and drop repeated rows. Returns `loader`."""
        kind: type[Any] = type(loader)
        if not issubclass(kind, _CountingLoader) and hasattr(kind, "end_of_dataloader"):
            counting = type(kind.__name__, (_CountingLoader, kind), {})
            # Accelerate's loaders override `__class__` with a read-only property, so that they pass
            # isinstance(..., DataLoader). Bypass that property to set the class.
            object.__dict__["__class__"].__set__(loader, counting)
            loader._batches_of_shardwise = self
        return loader

    def count(self, loader: Any, batch: Any) -> tuple[Any, CountedBatch]:
        """Return the latest batch of `loader` and its counts.

        In a training batch, repeated rows are dropped.
        """
        training = self._is_training()
        shown, counted = last_batch(loader, batch, self._world, cuts=training)
        if self._sequences is not None and trained_engines():
            part = self._sequences.split(shown)
            shown = self._sequences.show(part, counted.samples, training=training)
            counted = replace(counted, is_evaluated=not training)
        return shown, counted


class _CountingLoader:
    """Mixin that is placed before a prepared loader's own class, and counts its batches."""

    _batches_of_shardwise: PreparedBatches

    def __iter__(self) -> Iterator[Any]:
        ours, batches = self._batches_of_shardwise, super().__iter__()  # type: ignore[misc]
        return ours.iterate(self, batches, lambda _, batch: ours.count(self, batch))


def last_batch(loader: Any, batch: Any, world: sw.World, *, cuts: bool) -> tuple[Any, CountedBatch]:
    """Return `batch`, the last one of `loader`, with its counts.

    Drops repeated rows if `cuts` is true.
    """
    rows = find_batch_size(batch)
    samples = own_samples(loader, rows, world) if loader.end_of_dataloader else rows
    if samples == rows or not cuts:
        return batch, CountedBatch(samples, is_cut=False, has_repeated=samples < rows)
    shown = _first_rows(batch, rows, samples) if samples else batch
    return shown, CountedBatch(samples, is_cut=True)


def own_samples(loader: Any, rows: int, world: sw.World) -> int:
    """Return how many of the `rows` in this rank's last batch from `loader` are not repeated.

    Accelerate's repeated samples are in the last rows of the last ranks. If each worker reads an
    IterableDataset separately (dispatch_batches=False), repeated rows cannot be recognised. In this
    case all rows count, and a message says so.
    """
    if world.data_size == 1:
        return rows
    if isinstance(loader, DataLoaderDispatcher):
        return _share_of_rank(loader.remainder, rows, world.data_rank)
    shard = loader.batch_sampler  # samplers are nested: find the one that shards
    while shard is not None and not isinstance(shard, BatchSamplerShard):
        shard = getattr(shard, "batch_sampler", None)
    if shard is None:
        world.say_once(
            "exact_mean=True cannot recognize repeated samples at the end of an IterableDataset "
            "with dispatch_batches=False: they count again."
        )
        return rows
    if not shard.even_batches or shard.drop_last:
        return rows
    sampler: Any = shard.batch_sampler  # yields the batches of all ranks
    size = getattr(sampler, "batch_size", None)
    if size is None:  # batches of any size: Accelerate repeats entire batches
        left = len(sampler) % world.data_size
        return rows if left == 0 or world.data_rank < left else 0
    each = size // world.data_size if shard.split_batches else size
    if rows != each:
        raise UsageError(
            f"exact_mean=True cannot recognize repeated samples: a batch of {each} samples has a "
            f"first tensor of {rows} rows. Make collate_fn return one row per sample, or write "
            "DataLoader(..., drop_last=True)."
        )
    left = len(sampler.sampler) % (each * world.data_size)
    return _share_of_rank(left, each, world.data_rank) if left else rows


def _share_of_rank(total: int, each: int, rank: int) -> int:
    """Return how many of the first `total` rows this rank has, if each rank has `each` rows."""
    return min(max(total - rank * each, 0), each)


def _first_rows(data: Any, rows: int, first: int) -> Any:
    """Return `data`, with only the first `first` rows of each tensor or column of `rows` rows."""
    if isinstance(data, Tensor):
        return data[:first] if data.ndim and len(data) == rows else data
    if isinstance(data, Mapping):
        cut = {name: _first_rows(each, rows, first) for name, each in data.items()}
        return type(data)(cut)  # type: ignore[call-arg]
    if isinstance(data, tuple | list):
        if any(isinstance(each, Tensor | Mapping | tuple | list) for each in data):
            return honor_type(data, (_first_rows(each, rows, first) for each in data))
        return data[:first] if len(data) == rows else data
    return data
