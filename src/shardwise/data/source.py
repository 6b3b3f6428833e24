"""Sources read the user's dataset, in DataLoader workers or in the main process.

A source is asked for one micro-batch at a time and hands it back collated, with what it holds.
Whatever the dataset or the collate function draws comes from generators seeded by what the draw
is for, so neither the number of ranks nor of workers changes it; the generators of the main
process are as they were.
"""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch.utils.data import ConcatDataset, IterableDataset, Subset, TensorDataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from shardwise.data.batch_cuts import BatchCut
from shardwise.errors import DataError
from shardwise.world.randomness import preserved, seed_from

Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """One micro-batch of this rank.

    `part` of `parts` in its step, whose total batch has `total` rows. `samples` counts this
    rank's own rows in it, 0 for a stand-in, and `whole` those of all ranks in it, 0 if this rank
    does not know; `all_have` is whether every rank has some. `indices`
    are the dataset items to read, a stand-in's too, where the dataset is map-style; `place` the
    rows [first, end) of the total batch that it has. Where a stream is this rank's own part there
    is no such place, and `rows` is what the step has of it: 0 past its end, and -1 where it never
    had a sample.
    """

    epoch: int
    part: int
    parts: int
    total: int
    samples: int
    whole: int = 0
    rows: int = 0
    place: tuple[int, int] | None = None
    indices: tuple[Any, ...] = ()
    all_have: bool = True

    @property
    def last(self) -> bool:
        """Whether the step ends with this micro-batch."""
        return self.part == self.parts - 1


Item = tuple[MicroBatch, Any]
"""A micro-batch and its data."""


@dataclass(frozen=True)
class StreamRequest:
    """Asks a stream for micro-batch `number` of a reading, which starts after `skip` samples.

    `run` tells one reading from the next, so that a kept worker starts over.
    """

    run: int
    epoch: int
    skip: int
    number: int


class MapSource:
    """Reads a map-style dataset: any micro-batch, in any order.

    With `seed_samples`, a sample draws from generators seeded by (seed, epoch, index); without,
    a micro-batch does by its first index, and a dataset's own batched fetch is used.
    """

    def __init__(
        self, dataset: Any, collate: Collate, *, seed: int, seed_samples: bool, may_draw: bool
    ) -> None:
        self.dataset = dataset
        self._collate = collate
        self._seed = seed
        self._seed_samples = seed_samples
        self._may_draw = may_draw

    def __getitems__(self, micro: MicroBatch) -> Item:
        with _kept_apart() if self._may_draw else nullcontext():
            rows = self._rows(micro)
            self._seed_for("collate", micro.epoch, micro.indices[0])
            return micro, self._collate(rows)

    def close(self) -> None:
        """Nothing stays open between micro-batches."""

    def _rows(self, micro: MicroBatch) -> list[Any]:
        if self._seed_samples:
            return [self._row(micro.epoch, index) for index in micro.indices]
        self._seed_for("batch", micro.epoch, micro.indices[0])
        batched = getattr(self.dataset, "__getitems__", None)
        if batched is not None:
            return list(batched(list(micro.indices)))
        return [self.dataset[index] for index in micro.indices]

    def _row(self, epoch: int, index: Any) -> Any:
        self._seed_for("sample", epoch, index)
        return self.dataset[index]

    def _seed_for(self, what: str, epoch: int, index: Any) -> None:
        if self._may_draw:
            seed_cpu(seed_from(self._seed, what, epoch, str(index)))


class StreamSource:
    """Reads an iterable dataset from its start, giving the micro-batches that it is asked for.

    Every worker reads the whole of this rank's stream, and collates only what is asked of it, so
    the number of workers changes nothing. With `sliced`, the stream is the same on all ranks, and
    each takes its parts of every total batch by `cut`; without, the stream is this rank's own
    part. A step reads `chunk` samples of it.
    """

    def __init__(
        self,
        dataset: Any,
        collate: Collate,
        *,
        seed: int,
        cut: BatchCut,
        chunk: int,
        rank: int,
        sliced: bool,
        drop_last: bool,
    ) -> None:
        self.dataset = dataset
        self._collate = collate
        self._seed = seed
        self._cut_of, self.chunk = cut, chunk
        self._rank, self._sliced = rank, sliced
        self._drop_last = drop_last and sliced
        self._run = -1
        self._micros: Iterator[tuple[MicroBatch, list[Any]]] = iter(())
        self._number = 0

    def __getitems__(self, request: StreamRequest) -> Item | None:
        """The micro-batch asked for, or None past the end of the stream.

        Numbers asked of one source only rise.
        """
        if request.run != self._run:
            self.close()
            self._micros = self._read(request)
            self._run = request.run
        found = None
        while self._number <= request.number:
            found = next(self._micros, None)
            if found is None:
                return None
            self._number += 1
        if found is None:
            return None
        micro, rows = found
        with _kept_apart():
            number = self._cut_of.number(request.number)
            seed_cpu(seed_from(self._seed, "collate", *self._who, request.epoch, number))
            return micro, self._collate(rows) if rows else None

    def close(self) -> None:
        """Let go of the user's stream."""
        self._micros, self._run, self._number = iter(()), -1, 0

    @property
    def _who(self) -> tuple[int, ...]:
        return () if self._sliced else (self._rank,)

    def _read(self, request: StreamRequest) -> Iterator[tuple[MicroBatch, list[Any]]]:
        """The micro-batches of a reading, uncollated. A rank's own part ends with one of 0 rows
        that holds a stand-in, or of -1 rows where there was not a single sample."""
        newest: deque[Any] = deque(maxlen=1)
        for chunk in self._chunks(request, newest):
            yield from self._cut(chunk, request.epoch)
        if not self._sliced:
            rows = 0 if newest else -1
            end = MicroBatch(epoch=request.epoch, part=0, parts=1, total=0, samples=0, rows=rows)
            yield end, list(newest)
        elif not newest:
            raise DataError(
                f"The stream {type(self.dataset).__name__} gave no sample in epoch "
                f"{request.epoch}: check what it reads, and that it can be iterated again."
            )

    def _chunks(self, request: StreamRequest, newest: deque[Any]) -> Iterator[list[Any]]:
        """The rows of each step. `newest` holds the sample read last.

        The stream draws from generators of its own, which rest while others draw.
        """
        draws = SavedGenerators(seed_from(self._seed, "stream", *self._who, request.epoch))
        with draws.going_on(), _as_if_no_worker():
            if hasattr(self.dataset, "set_epoch"):
                self.dataset.set_epoch(request.epoch)
            stream = iter(self.dataset)
            newest.extend(islice(stream, request.skip))
        while True:
            with draws.going_on(), _as_if_no_worker():
                chunk = list(islice(stream, self.chunk))
            newest.extend(chunk)
            short = len(chunk) < self.chunk
            if chunk and not (short and self._drop_last):
                yield chunk
            if short:
                return

    def _cut(self, chunk: list[Any], epoch: int) -> Iterator[tuple[MicroBatch, list[Any]]]:
        """The micro-batches of a step's rows; the first row stands in where there are none."""
        cuts = (self._cut_of.parts if self._sliced else self._cut_of.of_own)(len(chunk))
        # Of a part of its own this rank does not know what the others have: they tell later.
        all_have = self._cut_of.all_have(len(chunk)) if self._sliced else [True] * len(cuts)
        wholes = self._cut_of.wholes(len(chunk)) if self._sliced else [0] * len(cuts)
        rows = cuts[-1][1] - cuts[0][0]
        for part, (first, end) in enumerate(cuts):
            micro = MicroBatch(
                epoch=epoch,
                part=part,
                parts=len(cuts),
                total=len(chunk),
                samples=end - first,
                whole=wholes[part],
                rows=rows,
                place=(first, end) if self._sliced else None,
                all_have=all_have[part],
            )
            yield micro, chunk[first:end] or self._cut_of.stand_in(chunk)


def may_draw(dataset: Any) -> bool:
    """Whether reading a sample might draw random numbers; False only where it surely does not."""
    if isinstance(dataset, Subset):
        return may_draw(dataset.dataset)
    if isinstance(dataset, ConcatDataset):
        return any(may_draw(part) for part in dataset.datasets)
    if isinstance(dataset, TensorDataset | list | tuple | range | torch.Tensor):
        return False
    form = getattr(dataset, "format", None)  # Hugging Face's; "custom" is a user's transform
    return not (isinstance(form, dict) and form.get("type", "custom") != "custom")


class WrappedStream(IterableDataset[Any]):
    """A stream of ours that reads the user's `dataset`."""

    dataset: Any


def show_own_dataset(worker_init_fn: Callable[[int], None] | None, worker: int) -> None:
    """Start a worker: `get_worker_info().dataset` is the user's dataset, as the user expects."""
    info = get_worker_info()
    assert info is not None
    dataset = info.dataset.dataset  # type: ignore[attr-defined]
    if isinstance(dataset, WrappedStream):
        dataset = dataset.dataset
    object.__setattr__(info, "dataset", dataset)
    if worker_init_fn is not None:
        worker_init_fn(worker)


def as_is(batch: Any) -> Any:
    """The collate function of torch's DataLoader: sources collate by themselves."""
    return batch


def seed_cpu(seed: int) -> None:
    """Seed the CPU generators of torch, numpy (where loaded) and random; cheap, per sample."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed)


def _kept_apart() -> AbstractContextManager[None]:
    """Generators are restored on leaving, where the main process has them; a worker's are ours."""
    return preserved() if get_worker_info() is None else nullcontext()


class SavedGenerators:
    """The state of generators, which go on from there whoever has drawn in between."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._states: tuple[Any, ...] | None = None

    @contextmanager
    def going_on(self) -> Iterator[None]:
        numpy: Any = sys.modules.get("numpy")
        with preserved():
            if self._states is None:
                seed_cpu(self._seed)
            else:
                torch.set_rng_state(self._states[0])
                random.setstate(self._states[1])
                if numpy is not None and self._states[2] is not None:
                    numpy.random.set_state(self._states[2])
            yield
            self._states = (
                torch.get_rng_state(),
                random.getstate(),
                numpy and numpy.random.get_state(),
            )


@contextmanager
def _as_if_no_worker() -> Iterator[None]:
    """Hide the worker from the dataset while it is read.

    A dataset that shards itself by `get_worker_info` would give each worker a part, but every
    worker reads the whole here; told of no workers, it gives the whole.
    """
    info = torch_worker._worker_info
    torch_worker._worker_info = None
    try:
        yield
    finally:
        torch_worker._worker_info = info
