"""Joins the parts of a stream, which several ranks read, in training order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from shardwise.data import order
from shardwise.data.position import PartOrder
from shardwise.data.source import WrappedStream
from shardwise.errors import DataError
from shardwise.world.generator_states import SavedGenerators
from shardwise.world.randomness import seed_from


class JoinedParts(WrappedStream):
    """All parts of a stream as one stream, in the order in which the ranks trained on them.

    `part_order.parts` is the number of ranks. A global batch is rank 0's share from part 0, then
    rank 1's share from part 1, and so on:

        part 0   a b c d e      batches of 4 on 2 ranks   a b u v | c d w x | e y
        part 1   u v w x y      joined                    a b u v   c d w x   e y

    Each part draws the same random numbers as on the rank that originally read it. Raises DataError
    if the dataset has no method `shard`.
    """

    def __init__(self, dataset: Any, part_order: PartOrder, seed: int) -> None:
        if part_order.parts > 1 and not hasattr(dataset, "shard"):
            raise DataError(
                f"The checkpoint is from the middle of an epoch: {part_order.parts} workers each "
                f"read a part of {type(dataset).__name__}, in total batches of "
                f"{part_order.batch}. On another number of workers, or with another batch_size, "
                "this Loader must read all parts, and the dataset has no method "
                "shard(num_shards, index) to get them. Resume with the same number of workers "
                "and the same batch_size, or save at the end of an epoch."
            )
        self.dataset = dataset
        self._part_order, self._seed = part_order, seed
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        readers = [self._reader(rank) for rank in range(self._part_order.parts)]
        # Parts may differ in length. Read until the last one ends, as the ranks themselves would.
        while any(chunks := [read() for read in readers]):
            for chunk in chunks:
                yield from chunk

    def _reader(self, rank: int) -> Callable[[], list[Any]]:
        """Return a function that reads the samples of `rank`'s part for the next step."""
        count = self._part_order.parts
        first, end = order.share(self._part_order.batch, count, rank)
        # This process reads the parts in turns, but each part must draw the random numbers that its
        # own rank would draw. So each has separate generator states.
        draws = SavedGenerators(seed_from(self._seed, "stream", rank, self._epoch))
        with draws.resume():
            part = part_of(self.dataset, count, rank)
            if hasattr(part, "set_epoch"):
                part.set_epoch(self._epoch)
            samples = iter(part)

        def read() -> list[Any]:
            with draws.resume():
                return list(islice(samples, end - first))

        return read


def part_of(dataset: Any, count: int, rank: int) -> Any:
    """Return the part of `dataset` that rank `rank` of `count` ranks reads.

    If the dataset has no `shard` method, it is already this rank's part.
    """
    if count > 1 and hasattr(dataset, "shard"):
        return dataset.shard(num_shards=count, index=rank)
    return dataset
