"""Readers decide what a rank asks of its source, and what becomes of the answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import default_collate

from shardwise.data import order
from shardwise.data.batch_cuts import BatchCut
from shardwise.data.batch_schedule import (
    BatchSchedule,
    FromBatchSampler,
    FromSampler,
    InOrder,
    length_of,
)
from shardwise.data.checks import LoaderArguments
from shardwise.data.joined_parts import JoinedParts, part_of
from shardwise.data.position import PartOrder, Position
from shardwise.data.source import Item, MapSource, MicroBatch, StreamRequest, StreamSource, may_draw
from shardwise.errors import DataError
from shardwise.world.world import World


class Reader(ABC):
    """One way of reading. `source` does it, in DataLoader workers or in the main process.

    `epoch_length` is the number of samples that every epoch has, None where that may differ;
    `steps` the number of steps of an epoch, None where unknown. `order` is that of a stream.
    """

    source: Any
    order: PartOrder | None = None
    epoch_length: int | None = None
    steps: int | None = None

    @abstractmethod
    def asks(self, run: int, at: Position) -> Iterator[Any]:
        """What to ask of the source, one item per micro-batch, for pass `run` from `at` on."""

    def delivered(self, answers: Iterator[Item | None]) -> Iterator[Item]:
        """The micro-batches of a pass, from what the source answers; None is past its end."""
        return takewhile(lambda item: item is not None, answers)  # type: ignore[arg-type]

    def close(self) -> None:
        """Let go of what a pass has open in this process."""
        self.source.close()


def part_order(given: LoaderArguments, world: World, at: Position) -> PartOrder | None:
    """Return the order of the stream's samples after `at`; None for a map-style dataset.

    An epoch keeps its order until its end, even if the number of ranks changes: in another order
    the samples before `at` would be other ones. Raises DataError if islands would make different
    numbers of steps.
    """
    if not given.stream:
        return None
    own = PartOrder()
    if world.island_count > 1:
        _check_islands(given, world)
    elif _sharded_by_dataset(given):
        assert given.batch_size is not None
        own = PartOrder(parts=world.data_size, batch=given.batch_size)
    if at.offset == 0:  # at the start of an epoch no sample has a place yet
        return own
    if at.order is None:
        if own.parts > 1:
            world.say_once(
                "the position of the Loader is of an earlier version, which did not save how many "
                f"workers read parts of the stream: the epoch is right if they were {own.parts}."
            )
        return own
    return at.order if at.order in (own, PartOrder()) else replace(at.order, joined=True)


def reader(given: LoaderArguments, world: World, found: PartOrder | None) -> Reader:
    """The reader for checked arguments and the order of a stream."""
    if found is None:
        return MapReader(given, world)
    if found.parts and not found.joined:
        return PartReader(given, world, found)
    return SliceReader(given, world, found)


def _check_islands(given: LoaderArguments, world: World) -> None:
    if given.sharding == "dataset":
        raise DataError(
            f'sharding="dataset" with {world.island_count} islands, which make as many steps each '
            "whatever is in a part of the stream, and know nothing of each other in between: give "
            'sharding="slice".'
        )


class MapReader(Reader):
    """Each rank reads its share of every total batch of a schedule."""

    def __init__(self, given: LoaderArguments, world: World) -> None:
        draws, seed_samples = may_draw(given.dataset), given.seed_samples
        self.source = MapSource(
            given.dataset,
            given.collate_fn or default_collate,
            seed=world.seed,
            seed_samples=draws if seed_samples is None else seed_samples,
            may_draw=draws or given.collate_fn is not None,
        )
        self._cut = given.cut
        self._schedule = _schedule(given, world)
        self.epoch_length, self.steps = self._schedule.epoch_length, self._schedule.steps

    def asks(self, run: int, at: Position) -> Iterator[MicroBatch]:
        return micros(self._schedule.batches(at.epoch, at.offset), at.epoch, self._cut)


class SliceReader(Reader):
    """Every rank reads the whole stream and keeps its share of each total batch."""

    def __init__(self, given: LoaderArguments, world: World, found: PartOrder) -> None:
        assert given.batch_size is not None
        self.order = found
        dataset = given.dataset
        if found.parts:
            dataset = JoinedParts(dataset, found, world.seed)
            world.say_once(
                f"this epoch began with {found.parts} worker(s) that read a part of "
                f"{type(given.dataset).__name__} each, in total batches of {found.batch}: until "
                "its end every worker reads all parts and keeps its share"
            )
        self.source = _stream_source(given, dataset, world, sliced=True)
        length = length_of(dataset)
        if length is not None:
            self.steps = order.steps_per_epoch(length, given.batch_size, drop_last=given.drop_last)

    def asks(self, run: int, at: Position) -> Iterator[StreamRequest]:
        return requests(run, at.epoch, at.offset)


class PartReader(Reader):
    """Every rank reads a part of its own, until the parts of all ranks have ended."""

    def __init__(self, given: LoaderArguments, world: World, found: PartOrder) -> None:
        assert given.batch_size is not None
        self.order = found
        dataset = part_of(given.dataset, world.data_size, world.data_rank)
        self.source = _stream_source(given, dataset, world, sliced=False)
        self._world = world
        self._needed = given.batch_size if given.drop_last else 1
        self._parts = given.cut.count(given.batch_size)

    def asks(self, run: int, at: Position) -> Iterator[StreamRequest]:
        return requests(run, at.epoch, at.steps * self.source.chunk)

    def delivered(self, answers: Iterator[Item | None]) -> Iterator[Item]:
        items = super().delivered(answers)
        return until_all_finish(items, self._world, parts=self._parts, needed=self._needed)


def micros(batches: Iterable[Sequence[Any]], epoch: int, cut: BatchCut) -> Iterator[MicroBatch]:
    """A rank's micro-batches of the total `batches`; a first row stands in where it has none."""
    for batch in batches:
        rows = len(batch)
        cuts, all_have, wholes = cut.parts(rows), cut.all_have(rows), cut.wholes(rows)
        for part, (first, end) in enumerate(cuts):
            yield MicroBatch(
                epoch=epoch,
                part=part,
                parts=len(cuts),
                total=rows,
                samples=end - first,
                whole=wholes[part],
                place=(first, end),
                indices=tuple(batch[first:end] or cut.stand_in(batch)),
                all_have=all_have[part],
            )


def requests(run: int, epoch: int, skip: int) -> Iterator[StreamRequest]:
    """One micro-batch of a stream after another, until nobody asks any more."""
    number = 0
    while True:
        yield StreamRequest(run, epoch, skip, number)
        number += 1


def until_all_finish(
    items: Iterator[Item], world: World, *, parts: int, needed: int
) -> Iterator[Item]:
    """`items` of this rank's own part of a stream, going on until every rank's part has ended.

    Each step begins with one small collective of the rows that the ranks have, and is the last
    where they are fewer than `needed`. A rank that has finished goes on with a stand-in.
    Raises DataError, on all ranks, for a part without samples.
    """
    stand_in: Any = None
    finished = False
    epoch = 0
    while True:
        if not finished:
            micro, data = next(items)
            epoch = micro.epoch
            if micro.rows <= 0:
                finished, stand_in = True, data
        mine = micro.rows if not finished else -1 if stand_in is None else 0
        device = world.data.small_device
        row = torch.tensor([float(mine)], dtype=torch.float64, device=device)
        rows = [int(value) for value in world.data.gather_rows(row).flatten().tolist()]
        _check_parts(rows)
        total = sum(rows)
        if total < needed:
            return
        all_have = [order.all_have(min(rows), part) for part in range(parts)]
        if finished:
            for part in range(parts):
                micro = MicroBatch(
                    epoch=epoch, part=part, parts=parts, total=total, samples=0, all_have=False
                )
                # A copy each time: a loop that changes its batch in place must not change others.
                yield micro, pytree.tree_map_only(Tensor, Tensor.clone, stand_in)
            continue
        yield replace(micro, total=total, all_have=all_have[0]), data
        for part in range(1, parts):
            micro, data = next(items)
            yield replace(micro, total=total, all_have=all_have[part]), data


def _check_parts(rows: list[int]) -> None:
    empty = [str(rank) for rank, count in enumerate(rows) if count < 0]
    if empty:
        raise DataError(
            f"The part of the stream on rank(s) {', '.join(empty)} of {len(rows)} holds no sample: "
            'give each rank some, use sharding="slice", or start fewer workers.'
        )


def _schedule(given: LoaderArguments, world: World) -> BatchSchedule:
    if given.batch_sampler is not None:
        return FromBatchSampler(given.batch_sampler, world=world)
    size, drop_last = given.batch_size, given.drop_last
    assert size is not None
    if given.sampler is not None:
        return FromSampler(given.sampler, size, world=world, drop_last=drop_last)
    return InOrder(given.dataset, size, world=world, shuffle=given.shuffle, drop_last=drop_last)


def _stream_source(
    given: LoaderArguments, dataset: Any, world: World, *, sliced: bool
) -> StreamSource:
    assert given.batch_size is not None
    first, end = order.share(given.batch_size, world.data_size, world.data_rank)
    return StreamSource(
        dataset,
        given.collate_fn or default_collate,
        seed=world.seed,
        cut=given.cut,
        chunk=given.batch_size if sliced else end - first,
        rank=world.data_rank,
        sliced=sliced,
        drop_last=given.drop_last,
    )


def _sharded_by_dataset(given: LoaderArguments) -> bool:
    if given.sharding != "auto" or given.shards is not None:
        return given.sharding == "dataset"
    shards = getattr(given.dataset, "num_shards", getattr(given.dataset, "n_shards", given.size))
    return hasattr(given.dataset, "shard") and shards >= given.size
