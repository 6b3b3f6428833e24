"""Schedules which samples make each step of an epoch, alike on all ranks."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any, TypeVar

from torch import Tensor
from torch.utils.data import Subset, TensorDataset

from shardwise.comm import Collectives
from shardwise.data import order
from shardwise.data.source import SavedGenerators
from shardwise.errors import DataError
from shardwise.world.randomness import seed_from
from shardwise.world.world import World

T = TypeVar("T")

FEW = 64
"""Elements of a row by which ranks tell whether they hold the same."""


class BatchSchedule(ABC):
    """The total batches of a map-style dataset.

    `epoch_length` is the number of samples that every epoch gives, None where epochs may differ;
    `steps` the number of steps, None where it is not known before the epoch begins.
    """

    epoch_length: int | None = None
    steps: int | None = None

    @abstractmethod
    def batches(self, epoch: int, offset: int) -> Iterator[Sequence[Any]]:
        """The total batches of `epoch` from its sample `offset` on."""


class InOrder(BatchSchedule):
    """Our own order, shuffled or not: a pure function of (seed, epoch, length)."""

    def __init__(
        self, dataset: Any, batch_size: int, *, world: World, shuffle: bool, drop_last: bool
    ) -> None:
        length, seed = len(dataset), world.seed
        self._dataset, self._world, self._checked = dataset, world, False
        self._batch_size = batch_size
        self.epoch_length = order.used_length(length, batch_size, drop_last=drop_last)
        self.steps = order.steps_per_epoch(length, batch_size, drop_last=drop_last)
        self._length, self._seed, self._shuffle = length, seed, shuffle

    def batches(self, epoch: int, offset: int) -> Iterator[Sequence[Any]]:
        if not self._checked:
            _check_same_dataset(self._world, self._dataset)
            self._checked = True
        whole = order.epoch_order(self._seed, epoch, self._length, shuffle=self._shuffle)
        assert self.epoch_length is not None
        for rows in order.steps(self.epoch_length, self._batch_size, offset):
            yield order.indices(whole, rows)


class FromSampler(BatchSchedule):
    """The order that a user's sampler gives, drawn as it is needed, alike on all ranks."""

    def __init__(
        self, sampler: Iterable[Any], batch_size: int, *, world: World, drop_last: bool
    ) -> None:
        self._batch_size = batch_size
        self._sampler, self._world, self._drop_last = sampler, world, drop_last
        length = length_of(sampler)
        if length is not None:
            self.steps = order.steps_per_epoch(length, batch_size, drop_last=drop_last)

    def batches(self, epoch: int, offset: int) -> Iterator[Sequence[Any]]:
        blocks = _drawn(self._sampler, self._world, epoch, plain=_plain, each=lambda index: 1)
        agreed = _agreed(blocks, self._world, "sampler", epoch)
        # From the start, and not from `offset`: a sampler can only be drawn from in order.
        indices = islice(chain.from_iterable(agreed), offset, None)
        while batch := list(islice(indices, self._batch_size)):
            if self._drop_last and len(batch) < self._batch_size:
                return
            yield batch


class FromBatchSampler(BatchSchedule):
    """The total batches that a user's batch sampler gives; their sizes may vary."""

    def __init__(self, batch_sampler: Iterable[Iterable[Any]], *, world: World) -> None:
        self._sampler, self._world = batch_sampler, world
        self.steps = length_of(batch_sampler)

    def batches(self, epoch: int, offset: int) -> Iterator[Sequence[Any]]:
        blocks = _drawn(self._sampler, self._world, epoch, plain=_plain_batch, each=len)
        agreed = _agreed(blocks, self._world, "batch_sampler", epoch)
        passed = 0
        for number, batch in enumerate(chain.from_iterable(agreed)):
            if not batch:
                raise DataError(
                    f"The batch_sampler gave an empty batch (number {number} of epoch {epoch}); "
                    "every list is a total batch and holds at least one index."
                )
            if passed >= offset:
                yield batch
            passed += len(batch)


BLOCK = 2**16
"""Indices that are drawn at a time, and compared between the ranks."""


def _drawn(
    sampler: Iterable[Any],
    world: World,
    epoch: int,
    *,
    plain: Callable[[Any], T],
    each: Callable[[T], int],
) -> Iterator[list[T]]:
    """What `sampler` gives in `epoch`, each item made `plain`, in blocks of about `BLOCK` indices.

    `each` tells how many an item has. What is drawn is seeded alike on all ranks, and goes on from
    one block to the next, whoever draws in between.
    """
    # A generator function may draw between its items, so its draws are kept apart for as long as
    # it lives, and not only while it is made.
    draws = SavedGenerators(seed_from(world.seed, "sampler", epoch))
    with draws.going_on():
        for told in (sampler, getattr(sampler, "sampler", None)):
            if (set_epoch := getattr(told, "set_epoch", None)) is not None:
                set_epoch(epoch)
        items = iter(sampler)
    while True:
        block: list[T] = []
        held = 0
        with draws.going_on():
            for item in items:
                block.append(plain(item))
                held += each(block[-1])
                if held >= BLOCK:
                    break
        yield block
        if held < BLOCK:
            return


def _check_same_dataset(world: World, dataset: Any) -> None:
    """Raise DataError, on all ranks alike, where ranks hold different datasets.

    Told by type, length, a Subset's indices and some values of tensors: random_split and randn
    after sw.Engine draw differently on each rank.
    """
    if world.size == 1:
        return
    told = repr(list(_contents(dataset)))
    digest = hashlib.blake2b(told.encode(), digest_size=16).hexdigest()
    of_all = _comparing(world).gather_objects((type(dataset).__name__, len(dataset), digest))
    for rank, theirs in enumerate(of_all):
        if theirs != of_all[0]:
            one, other = (f"{kind} of {length}" for kind, length, _ in (of_all[0], theirs))
            raise DataError(
                f"Ranks hold different datasets: rank 0 has a {one}, rank {rank} a {other}"
                f"{' with other contents' if one == other else ''}. Give every rank the whole "
                "dataset, alike: the Loader takes the rank's share. Split it, and draw what is "
                "random in it, before the first forward to train on, in world.alike() or with a "
                "generator of its own."
            )


def _contents(dataset: Any) -> Iterator[Any]:
    """What can be told of a dataset without running code of the user's."""
    if isinstance(dataset, Subset):
        yield [_plain(index) for index in dataset.indices]
        yield from _contents(dataset.dataset)
    elif isinstance(dataset, TensorDataset):
        for tensor in dataset.tensors:
            yield from _contents(tensor)
    elif isinstance(dataset, Tensor) and len(dataset):
        for row in (dataset[0], dataset[len(dataset) // 2], dataset[-1]):
            yield row.detach().reshape(-1)[:FEW].tolist()


def _agreed(blocks: Iterator[list[T]], world: World, what: str, epoch: int) -> Iterator[list[T]]:
    """`blocks`, each compared between the ranks before any of it is used. Collective."""
    for block in blocks:
        if world.size > 1:
            _check_agreement(world, what, epoch, block)
        yield block


def _check_agreement(world: World, what: str, epoch: int, drawn: Sequence[Any]) -> None:
    digest = hashlib.blake2b(repr(drawn).encode(), digest_size=16).hexdigest()
    digests = _comparing(world).gather_objects(digest)
    others = [rank for rank, theirs in enumerate(digests) if theirs != digests[0]]
    if others:
        listed = ", ".join(map(str, others))
        raise DataError(
            f"The {what} gave rank 0 another order than rank(s) {listed} in epoch {epoch}. It must "
            "give the same total order on every rank, since the Loader takes each rank's share of "
            "it: draw with torch's global generator, which is seeded alike, or with a generator of "
            "the same seed."
        )


def _comparing(world: World) -> Collectives:
    """The ranks that compare what they read: all; those of this island where islands are elastic,
    since one that is back begins an epoch of which the others are in the midst."""
    world.current_batch.check_even("world.gather")
    return world.step_group if world.collectives.comes_and_goes else world.collectives


def _plain(index: Any) -> Any:
    """An index as an int where it is one in disguise (a 0-dim tensor, a numpy integer)."""
    return index.__index__() if hasattr(index, "__index__") else index


def _plain_batch(batch: Iterable[Any]) -> list[Any]:
    return [_plain(index) for index in batch]


def length_of(items: Any) -> int | None:
    """`len(items)`, or None where that is not known."""
    try:
        return len(items)
    except (TypeError, NotImplementedError):
        return None
