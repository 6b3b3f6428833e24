"""Readers, which request micro-batches from a source and assemble the results into a pass."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from shardwise.data.packing.collate import PackedCollate
from shardwise.data.packing.cut import PackedCut
from shardwise.data.position import PartOrder, Position
from shardwise.data.source import (
    Item,
    MapRequest,
    MapSource,
    MicroBatch,
    StreamRequest,
    StreamSource,
    may_draw,
)
from shardwise.data.token_budget import BudgetCut, ByTokens
from shardwise.errors import DataError
from shardwise.messages.printable import many
from shardwise.world.world import World


class Reader(ABC):
    """Reads the dataset through `source`, in DataLoader workers or in the main process.

    `epoch_length` is the number of samples in every epoch, or None if epochs may differ. `steps` is
    the number of steps per epoch, or None if unknown. `order` is the order of a stream's samples,
    or None for a map-style dataset.
    """

    source: Any
    order: PartOrder | None = None
    epoch_length: int | None = None
    steps: int | None = None

    @abstractmethod
    def requests_for(self, run: int, at: Position) -> Iterator[Any]:
        """Yield one request to the source per micro-batch, for pass `run` starting at `at`."""

    def delivered(self, answers: Iterator[Item | None]) -> Iterator[Item]:
        """Yield a pass's micro-batches from the source's `answers`, until an answer is None."""
        return takewhile(lambda item: item is not None, answers)  # type: ignore[arg-type]

    def close(self) -> None:
        """Release the resources that a pass uses in this process."""
        self.source.close()


def choose_part_order(arguments: LoaderArguments, world: World, at: Position) -> PartOrder | None:
    """Return the order of the stream's samples from `at`, or None for a map-style dataset.

    An epoch keeps its order until it ends, even if the world size changes. Raises DataError if
    islands would run different numbers of steps.
    """
    if not arguments.stream:
        return None
    own = PartOrder()
    if world.island_count > 1:
        _check_islands(arguments, world)
    elif _is_sharded_by_dataset(arguments):
        assert arguments.batch_size is not None
        own = PartOrder(parts=world.data_size, batch=arguments.batch_size)
    if at.offset == 0:  # an epoch that has not begun can use the order of this run
        return own
    # In a different order, the first `at.offset` samples would be different ones. Some samples
    # would be used twice in this epoch, and some not at all.
    if at.order is None:
        if own.parts > 1:
            world.say_once(
                "the position of the Loader is from an earlier version, which did not save how "
                "many workers read parts of the stream. The rest of this epoch is right only if "
                f"there were {own.parts}."
            )
        return own
    return at.order if at.order in (own, PartOrder()) else replace(at.order, joined=True)


def reader(arguments: LoaderArguments, world: World, part_order: PartOrder | None) -> Reader:
    """Create the reader for validated arguments and the order of a stream."""
    if part_order is None:
        return MapReader(arguments, world)
    if part_order.parts and not part_order.joined:
        return PartReader(arguments, world, part_order)
    return SliceReader(arguments, world, part_order)


def _check_islands(arguments: LoaderArguments, world: World) -> None:
    if arguments.sharding == "dataset":
        raise DataError(
            f'sharding="dataset" cannot be combined with {world.island_count} islands: all islands '
            "make the same number of steps, but the parts of the stream may differ in length. "
            'Write sharding="slice".'
        )


class MapReader(Reader):
    """Reads this rank's share of every global batch in a schedule."""

    def __init__(self, arguments: LoaderArguments, world: World) -> None:
        self.source = MapSource(
            arguments.dataset,
            _collate_of(arguments),
            seed=world.seed,
            seed_samples=arguments.seed_samples,
            may_draw=may_draw(arguments.dataset),
            collate_may_draw=arguments.collate_fn is not None,
        )
        self._cut = arguments.cut
        self._budget_cut: BudgetCut | PackedCut | None = None
        if (budget := arguments.budget) is not None:
            kind = BudgetCut if budget.packing is None else PackedCut
            self._budget_cut = kind(budget, arguments.size, arguments.rank, arguments.shards)
        self._schedule = _schedule(arguments, world)
        self._requested: deque[MicroBatch] = deque()  # of the latest pass, and not delivered yet
        self.epoch_length, self.steps = self._schedule.epoch_length, self._schedule.steps

    def requests_for(self, run: int, at: Position) -> Iterator[MapRequest]:
        batches = self._schedule.batches(at.epoch, at.offset)
        if self._budget_cut is not None:
            micros = self._budget_cut.micro_batches(batches, at.epoch)
        else:
            micros = cut_batches(batches, at.epoch, self._cut)
        self._requested = deque()
        return self._request(micros, self._requested)

    def _request(
        self, micros: Iterator[MicroBatch], requested: deque[MicroBatch]
    ) -> Iterator[MapRequest]:
        for micro in micros:
            requested.append(micro)
            yield MapRequest(micro.epoch, micro.indices, micro.packed)

    def delivered(self, answers: Iterator[Any]) -> Iterator[Item]:
        # Descriptions stay in this process. Workers only receive indices and return data, in the
        # order of the requests.
        requested = self._requested
        for data, collate_draws in answers:
            micro = requested.popleft()
            if collate_draws:  # `replace` is slow
                micro = replace(micro, collate_draws=True)
            yield micro, data


class SliceReader(Reader):
    """Reads the full stream on every rank, and selects this rank's share of each global batch."""

    def __init__(self, arguments: LoaderArguments, world: World, part_order: PartOrder) -> None:
        assert arguments.batch_size is not None
        self.order, self._world = part_order, world
        self._dataset = dataset = arguments.dataset
        if part_order.parts:
            dataset = JoinedParts(dataset, part_order, world.seed)
            world.say_once(
                f"this epoch began with {many(part_order.parts, 'worker')}, each reading a part of "
                f"{type(arguments.dataset).__name__}, in total batches of {part_order.batch}. "
                "Until it ends, every worker reads all parts and keeps its share"
            )
        self.source = _stream_source(arguments, dataset, world, sliced=True)
        length = length_of(dataset)
        if length is not None:
            self.steps = order.steps_per_epoch(
                length, arguments.batch_size, drop_last=arguments.drop_last
            )

    def requests_for(self, run: int, at: Position) -> Iterator[StreamRequest]:
        state = at.stream if self.source.has_states else None
        if at.offset and state is None:
            _announce_skip(self._world, self._dataset, at.offset)
        return stream_requests(run, at.epoch, at.offset, state)


class PartReader(Reader):
    """Reads this rank's own part of a stream, until the parts of all ranks are exhausted."""

    def __init__(self, arguments: LoaderArguments, world: World, part_order: PartOrder) -> None:
        assert arguments.batch_size is not None
        self.order = part_order
        dataset = part_of(arguments.dataset, world.data_size, world.data_rank)
        self.source = _stream_source(arguments, dataset, world, sliced=False)
        self._world, self._dataset = world, arguments.dataset
        self._needed = arguments.batch_size if arguments.drop_last else 1
        self._parts = arguments.cut.count(arguments.batch_size)

    def requests_for(self, run: int, at: Position) -> Iterator[StreamRequest]:
        if skip := at.steps * self.source.chunk:
            _announce_skip(self._world, self._dataset, skip)
        return stream_requests(run, at.epoch, skip)

    def delivered(self, answers: Iterator[Item | None]) -> Iterator[Item]:
        items = super().delivered(answers)
        return until_all_finish(items, self._world, parts=self._parts, needed=self._needed)


def cut_batches(
    batches: Iterable[Sequence[Any]], epoch: int, cut: BatchCut
) -> Iterator[MicroBatch]:
    """Yield one rank's micro-batches of the global `batches`.

    The first row of a global batch is the stand-in for a rank without rows.
    """
    previous = -1
    for batch in batches:
        rows = len(batch)
        if rows != previous:  # the cuts depend on nothing else
            cuts, all_have, total_rows = cut.parts(rows), cut.all_have(rows), cut.total_rows(rows)
            previous = rows
        for part, (first, end) in enumerate(cuts):
            yield MicroBatch(
                epoch=epoch,
                part=part,
                parts=len(cuts),
                total=rows,
                samples=end - first,
                whole=total_rows[part],
                place=(first, end),
                indices=tuple(batch[first:end] or cut.stand_in(batch)),
                all_have=all_have[part],
            )


def _announce_skip(world: World, dataset: Any, count: int) -> None:
    world.say_once(
        f"{type(dataset).__name__} is read from its start: every worker skips {count:,} samples "
        "that were used before"
    )


def stream_requests(run: int, epoch: int, skip: int, state: Any = None) -> Iterator[StreamRequest]:
    """Yield requests for consecutive micro-batches of a stream, endlessly."""
    # The length of a stream is unknown, so the reader stops at the first answer past the end.
    number = 0
    while True:
        yield StreamRequest(run, epoch, skip, number, state)
        number += 1


def until_all_finish(
    items: Iterator[Item], world: World, *, parts: int, needed: int
) -> Iterator[Item]:
    """Yield `items` of this rank's part of a stream until the parts of all ranks are exhausted.

    Each step starts with one small collective, in which ranks exchange their row counts. The pass
    ends when the total is below `needed`. A rank whose part is exhausted continues with a stand-in.
    Raises DataError on all ranks if a part has no samples.
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
        # The exchanged number is the rows of this step, 0 if the part is exhausted, or -1 if it was
        # empty.
        mine = micro.rows if not finished else -1 if stand_in is None else 0
        device = world.data.small_device
        row = torch.tensor([float(mine)], dtype=torch.float64, device=device)
        rows = [int(value) for value in world.data.gather_rows(row).flatten().tolist()]
        empty = [str(rank) for rank, count in enumerate(rows) if count < 0]
        if empty:
            raise DataError(
                f"The part of the stream on rank(s) {', '.join(empty)} of {len(rows)} has no "
                'samples. Give each rank some, write sharding="slice", or start fewer workers.'
            )
        total = sum(rows)
        if total < needed:
            return
        all_have = [order.all_have(min(rows), part) for part in range(parts)]
        if finished:
            for part in range(parts):
                micro = MicroBatch(
                    epoch=epoch, part=part, parts=parts, total=total, samples=0, all_have=False
                )
                # Copy it each time, because a loop that changes its batch in place must not affect
                # the next.
                yield micro, pytree.tree_map_only(Tensor, Tensor.clone, stand_in)
            continue
        yield replace(micro, total=total, all_have=all_have[0]), data
        for part in range(1, parts):
            micro, data = next(items)
            yield replace(micro, total=total, all_have=all_have[part]), data


def _collate_of(arguments: LoaderArguments) -> Callable[[list[Any]], Any]:
    packing = None if arguments.budget is None else arguments.budget.packing
    if packing is not None:
        return PackedCollate(packing.row, packing.attention)
    return arguments.collate_fn or _stacked


def _stacked(samples: list[Any]) -> Any:
    """Collate like torch. Raises DataError if the samples have different lengths."""
    try:
        return default_collate(samples)
    except RuntimeError as error:
        if "equal size" not in str(error):
            raise
        raise DataError(
            f"The samples of a batch have different sizes ({error}). Pass a collate_fn that pads "
            "them, or pack texts: sw.Loader(..., tokens=N, pack=sw.Packing(model, row=R))."
        ) from None


def _schedule(arguments: LoaderArguments, world: World) -> BatchSchedule:
    if arguments.batch_sampler is not None:
        return FromBatchSampler(arguments.batch_sampler, world=world)
    if arguments.budget is not None:
        return ByTokens(arguments.dataset, arguments.budget, world=world, shuffle=arguments.shuffle)
    size, drop_last = arguments.batch_size, arguments.drop_last
    assert size is not None
    if arguments.sampler is not None:
        return FromSampler(arguments.sampler, size, world=world, drop_last=drop_last)
    return InOrder(
        arguments.dataset,
        size,
        world=world,
        shuffle=arguments.shuffle,
        drop_last=drop_last,
        compared=arguments.compared,
    )


def _stream_source(
    arguments: LoaderArguments, dataset: Any, world: World, *, sliced: bool
) -> StreamSource:
    assert arguments.batch_size is not None
    first, end = order.share(arguments.batch_size, world.data_size, world.data_rank)
    return StreamSource(
        dataset,
        arguments.collate_fn or _stacked,
        seed=world.seed,
        cut=arguments.cut,
        chunk=arguments.batch_size if sliced else end - first,
        rank=world.data_rank,
        sliced=sliced,
        drop_last=arguments.drop_last,
        reports=world.is_main,
    )


def _is_sharded_by_dataset(arguments: LoaderArguments) -> bool:
    if arguments.sharding != "auto" or arguments.shards is not None:
        return arguments.sharding == "dataset"
    shards = getattr(
        arguments.dataset, "num_shards", getattr(arguments.dataset, "n_shards", arguments.size)
    )
    return hasattr(arguments.dataset, "shard") and shards >= arguments.size
