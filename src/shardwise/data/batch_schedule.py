"""Determines the global batches of each epoch of a map-style dataset, identically on all ranks."""

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
from shardwise.data.files.indexed_files import FileDataset
from shardwise.data.mixture import Mixture
from shardwise.errors import DataError
from shardwise.world.generator_states import SavedGenerators
from shardwise.world.randomness import seed_from
from shardwise.world.world import World

T = TypeVar("T")

FEW = 64
"""Number of leading elements per row that ranks compare to detect different datasets.
"""


class BatchSchedule(ABC):
    """The global batches of a map-style dataset.

    `epoch_length` is the number of samples in every epoch, or None if epochs may differ. `steps` is
    the number of steps per epoch, or None if it is unknown until an epoch starts.
    """

    epoch_length: int | None = None
    steps: int | None = None

    @abstractmethod
    def batches(self, epoch: int, offset: int) -> Iterator[Sequence[Any]]:
        """Yield the global batches of `epoch`, starting at its sample number `offset`."""


class InOrder(BatchSchedule):
    """The Loader's own order, shuffled or not. It depends only on (seed, epoch, length).

    Ranks compare their datasets once for each `world.admission`, and add it to `compared`.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        world: World,
        shuffle: bool,
        drop_last: bool,
        compared: set[int],
    ) -> None:
        length, seed = samples_per_epoch(dataset), world.seed
        self._dataset, self._world, self._compared = dataset, world, compared
        self._batch_size = batch_size
        self.epoch_length = order.used_length(length, batch_size, drop_last=drop_last)
        self.steps = order.steps_per_epoch(length, batch_size, drop_last=drop_last)
        self._seed, self._shuffle = seed, shuffle

    def batches(self, epoch: int, offset: int) -> Iterator[Sequence[Any]]:
        # Check here and not in __init__, because creating a Loader is not collective and a script
        # may do it on some ranks only. Iterating over a Loader is collective anyway.
        # Not again after a loss: a rank that was ahead of the others may repeat this call, and then
        # divide the rows again, while the others only divide them. But again after an admission.
        if (admission := self._world.admission) not in self._compared:
            check_same_dataset(self._world, self._dataset)
            self._compared.add(admission)
        whole = epoch_order(self._dataset, self._seed, epoch, shuffle=self._shuffle)
        assert self.epoch_length is not None
        for rows in order.steps(self.epoch_length, self._batch_size, offset):
            yield order.indices(whole, rows)


def samples_per_epoch(dataset: Any) -> int:
    """Return the number of samples in an epoch of a map-style dataset."""
    return dataset.samples if isinstance(dataset, Mixture) else len(dataset)


def epoch_order(dataset: Any, seed: int, epoch: int, *, shuffle: bool) -> Tensor | range:
    """Return the dataset indices of `epoch` for all ranks."""
    if isinstance(dataset, Mixture):
        return dataset.order(seed, epoch, shuffle=shuffle)
    return order.epoch_order(seed, epoch, len(dataset), shuffle=shuffle)


class FromSampler(BatchSchedule):
    """The order of a user's sampler. It is read in blocks, which must be identical on all ranks."""

    def __init__(
        self, sampler: Iterable[Any], batch_size: int, *, world: World, drop_last: bool
    ) -> None:
        self._batch_size = batch_size
        self._sampler, self._world, self._drop_last = sampler, world, drop_last
        length = length_of(sampler)
        if length is not None:
            self.steps = order.steps_per_epoch(length, batch_size, drop_last=drop_last)

    def batches(self, epoch: int, offset: int) -> Iterator[Sequence[Any]]:
        blocks = _draw_blocks(
            self._sampler, self._world, epoch, plain=_as_index, each=lambda index: 1
        )
        agreed = _check_blocks(blocks, self._world, "sampler", epoch)
        # Skip to `offset` after drawing, because a sampler can only be read from its start.
        indices = islice(chain.from_iterable(agreed), offset, None)
        while batch := list(islice(indices, self._batch_size)):
            if self._drop_last and len(batch) < self._batch_size:
                return
            yield batch


class FromBatchSampler(BatchSchedule):
    """The global batches of a user's batch sampler. Their sizes may differ."""

    def __init__(self, batch_sampler: Iterable[Iterable[Any]], *, world: World) -> None:
        self._sampler, self._world = batch_sampler, world
        self.steps = length_of(batch_sampler)

    def batches(self, epoch: int, offset: int) -> Iterator[Sequence[Any]]:
        blocks = _draw_blocks(
            self._sampler,
            self._world,
            epoch,
            plain=lambda batch: [_as_index(index) for index in batch],
            each=len,
        )
        agreed = _check_blocks(blocks, self._world, "batch_sampler", epoch)
        passed = 0
        for number, batch in enumerate(chain.from_iterable(agreed)):
            if not batch:
                raise DataError(
                    f"The batch_sampler returned an empty batch (number {number} of epoch "
                    f"{epoch}). Each list that it returns is a total batch, and needs at least "
                    "one index."
                )
            if passed >= offset:
                yield batch
            passed += len(batch)


BLOCK = 2**16
"""Number of indices that are drawn at a time and then compared across ranks."""


def _draw_blocks(
    sampler: Iterable[Any],
    world: World,
    epoch: int,
    *,
    plain: Callable[[Any], T],
    each: Callable[[T], int],
) -> Iterator[list[T]]:
    """Yield the items of `sampler` for `epoch`, in blocks of about `BLOCK` indices.

    `plain` converts an item, and `each` returns the number of indices in it. The sampler draws from
    generators that have the same seed on all ranks. Their state is saved between blocks, so other
    draws in the process do not affect the sampler.
    """
    # A sampler may be a generator function, which draws between its items. So it needs separate
    # generators for as long as it runs, and not only while `iter` runs.
    draws = SavedGenerators(seed_from(world.seed, "sampler", epoch))
    with draws.resume():
        for candidate in (sampler, getattr(sampler, "sampler", None)):
            if (set_epoch := getattr(candidate, "set_epoch", None)) is not None:
                set_epoch(epoch)
        items = iter(sampler)
    while True:
        block: list[T] = []
        held = 0
        with draws.resume():
            for item in items:
                block.append(plain(item))
                held += each(block[-1])
                if held >= BLOCK:
                    break
        yield block
        if held < BLOCK:
            return


def check_same_dataset(world: World, dataset: Any) -> None:
    """Raise DataError on every rank if the ranks hold different datasets. Collective.

    Compares the type, the length, the indices of a Subset and some tensor values. The usual cause
    of a difference is calling random_split or randn after training has started, because each rank
    then draws different values.
    """
    if world.size == 1:
        return
    contents = repr(list(_contents(dataset)))
    digest = hashlib.blake2b(contents.encode(), digest_size=16).hexdigest()
    group, mine = comparison_group(world), (type(dataset).__name__, len(dataset), digest)
    gathered = group.steadily(lambda: group.gather_objects(mine))
    for rank, theirs in enumerate(gathered):
        if theirs != gathered[0]:
            one, other = (f"{kind} of {length}" for kind, length, _ in (gathered[0], theirs))
            raise DataError(
                f"Ranks hold different datasets: rank 0 has a {one}, rank {rank} a "
                f"{other}{' with other contents' if one == other else ''}. Pass the full dataset "
                "on every rank: the Loader takes each rank's share. Random splits and random "
                "values must be the same too: draw them before the first forward in training, "
                "inside world.alike(), or with a torch.Generator of a fixed seed."
            )


def _contents(dataset: Any) -> Iterator[Any]:
    """Yield the values of a dataset that can be read without running user code."""
    if isinstance(dataset, Mixture):
        yield dataset.names, dataset.weights, dataset.samples, dataset.cumulative_sizes
        for part in dataset.datasets:
            yield from _contents(part)
    elif isinstance(dataset, FileDataset):
        yield dataset.contents
    elif isinstance(dataset, Subset):
        yield [_as_index(index) for index in dataset.indices]
        yield from _contents(dataset.dataset)
    elif isinstance(dataset, TensorDataset):
        for tensor in dataset.tensors:
            yield from _contents(tensor)
    elif isinstance(dataset, Tensor) and len(dataset):
        for row in (dataset[0], dataset[len(dataset) // 2], dataset[-1]):
            yield row.detach().reshape(-1)[:FEW].tolist()


def _check_blocks(
    blocks: Iterator[list[T]], world: World, what: str, epoch: int
) -> Iterator[list[T]]:
    """Yield each of the `blocks` after comparing it across ranks. Collective."""
    for block in blocks:
        if world.size > 1:
            _check_agreement(world, what, epoch, block)
        yield block


def _check_agreement(world: World, what: str, epoch: int, drawn: Sequence[Any]) -> None:
    digest = hashlib.blake2b(repr(drawn).encode(), digest_size=16).hexdigest()
    digests = comparison_group(world).gather_objects(digest)
    others = [rank for rank, theirs in enumerate(digests) if theirs != digests[0]]
    if others:
        listed = ", ".join(map(str, others))
        raise DataError(
            f"The {what} gave rank 0 a different order than rank(s) {listed} in epoch {epoch}. "
            "Every rank needs the same total order, because the Loader takes each rank's share "
            "of it. Draw from torch's global generator, which has the same seed on all ranks, or "
            "from a generator with a fixed seed."
        )


def comparison_group(world: World) -> Collectives:
    """Return the group of the ranks that compare their data.

    These are all ranks or, with elastic islands, the ranks of this island.
    """
    # An elastic island that has rejoined begins its epoch while the others are in the middle of
    # theirs, so they would not enter this collective.
    world.current_batch.check_even("world.gather")
    return world.step_group if world.collectives.has_changing_ranks else world.collectives


def _as_index(index: Any) -> Any:
    """Return `index` as an int if it is a 0-dim tensor or a NumPy integer, else unchanged."""
    return index.__index__() if hasattr(index, "__index__") else index


def length_of(items: Any) -> int | None:
    """Return `len(items)`, or None if it is unknown."""
    try:
        return len(items)
    except (TypeError, NotImplementedError):
        return None
