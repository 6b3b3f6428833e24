"""Reads all parts of a sharded stream on one rank, in the order that several ranks trained on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from shardwise.data import order
from shardwise.data.position import PartOrder
from shardwise.data.source import SavedGenerators, WrappedStream
from shardwise.errors import DataError
from shardwise.world.randomness import seed_from


class JoinedParts(WrappedStream):
    """One stream of the samples in all parts, in the order that `found.parts` ranks trained on.

    A total batch is rank 0's share from part 0, then rank 1's share from part 1, and so on:

        part 0   a b c d e      batches of 4 on 2 ranks   a b u v | c d w x | e y
        part 1   u v w x y      joined                    a b u v   c d w x   e y

    Each part draws from the generators that its own rank gives it. Raises DataError for a dataset
    that has no method `shard`.
    """

    def __init__(self, dataset: Any, found: PartOrder, seed: int) -> None:
        if found.parts > 1 and not hasattr(dataset, "shard"):
            raise DataError(
                f"The checkpoint is from the middle of an epoch: {found.parts} workers "
                f"read a part of {type(dataset).__name__} each, in total batches of {found.batch}. "
                "On another number of workers, or with another batch_size, this Loader must read "
                "all parts, and the dataset has no method shard(num_shards, index) that gives "
                "them. Resume with the same numbers, or save at the end of an epoch."
            )
        self.dataset = dataset
        self._found, self._seed = found, seed
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Tell the parts which epoch is read."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        readers = [self._reader(rank) for rank in range(self._found.parts)]
        while any(chunks := [read() for read in readers]):
            for chunk in chunks:
                yield from chunk

    def _reader(self, rank: int) -> Callable[[], list[Any]]:
        """A function that returns the next samples of `rank`'s part, as many as a step takes."""
        count = self._found.parts
        first, end = order.share(self._found.batch, count, rank)
        draws = SavedGenerators(seed_from(self._seed, "stream", rank, self._epoch))
        with draws.going_on():
            part = part_of(self.dataset, count, rank)
            if hasattr(part, "set_epoch"):
                part.set_epoch(self._epoch)
            samples = iter(part)

        def read() -> list[Any]:
            with draws.going_on():
                return list(islice(samples, end - first))

        return read


def part_of(dataset: Any, count: int, rank: int) -> Any:
    """The part of `dataset` that `rank` of `count` ranks reads; the dataset itself if it has no
    method `shard` and so is a part already."""
    if count > 1 and hasattr(dataset, "shard"):
        return dataset.shard(num_shards=count, index=rank)
    return dataset
