"""Sources, which read the user's dataset in DataLoader workers or in the main process.

A source receives a request for one micro-batch and returns the collated micro-batch. The dataset
and the collate function draw from generators that are seeded for each sample or batch. So their
draws do not depend on the number of ranks or workers, and the generators of the main process are
not advanced.
"""

from __future__ import annotations

import copy
import multiprocessing
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import islice
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import ConcatDataset, IterableDataset, Subset, TensorDataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from shardwise.data.batch_cuts import BatchCut
from shardwise.data.files.indexed_files import FileDataset
from shardwise.errors import DataError
from shardwise.world.generator_states import GeneratorStates, SavedGenerators, preserved
from shardwise.world.randomness import seed_cpu, seed_from

REPORT_SECONDS = 5.0
"""Seconds between two reports of the number of samples that have been skipped."""
SLOW = 5e-4
"""Seconds per sample. Above this, seeding every sample adds less than a twentieth to the reading.
"""
TRIALS = 16
"""Number of samples that are read again with other seeds."""
Collate = Callable[[list[Any]], Any]


@dataclass(kw_only=True, slots=True)  # not frozen: that takes four times as long, in every step
class MicroBatch:
    """One micro-batch of this rank: number `part` of the `parts` in its step. Never changed."""

    epoch: int
    part: int
    parts: int
    total: int
    """Number of rows in the step's global batch."""
    samples: int
    """Number of this rank's rows in the micro-batch, or 0 for a stand-in."""
    whole: int = 0
    """Number of all ranks' rows in the micro-batch, or 0 if this rank does not know."""
    rows: int = 0
    """Number of rows of the step in this rank's part of a stream.

    It is 0 after the end of the part, or -1 if the part was empty.
    """
    place: tuple[int, int] | None = None
    """Rows [first, end) of the global batch, or None for a rank's own part of a stream.
    """
    indices: tuple[Any, ...] = ()
    """Indices to read in a map-style dataset, also for a stand-in."""
    all_have: bool = True
    """True if every rank has rows in the micro-batch."""
    packed: tuple[tuple[int, ...], ...] = ()
    """The lengths of the documents in each packed row, in the order of `indices`."""
    tokens: int = 0
    """Number of tokens on all ranks, or 0 if lengths are unknown."""
    positions: int = 0
    """Number of positions that all ranks compute for these tokens, including padding."""
    stream: Any = None
    """State of the stream after the step, or None if it cannot continue from a state."""
    collate_draws: bool = False
    """True if `collate_fn` draws random numbers."""

    @property
    def last(self) -> bool:
        return self.part == self.parts - 1


Item = tuple[MicroBatch, Any]
"""A micro-batch and its data."""


@dataclass(frozen=True)
class StreamRequest:
    """A request for micro-batch `number` of a stream, after skipping `skip` samples of the stream.

    If `state` is not None, the stream loads it instead of skipping samples. A new value of `run`
    makes a persistent worker restart the stream.
    """

    run: int
    epoch: int
    skip: int
    number: int
    state: Any = None


class MapRequest(NamedTuple):
    """A request for the samples `indices` of a map-style dataset, as one collated micro-batch."""

    epoch: int
    indices: Sequence[Any]
    packed: tuple[tuple[int, ...], ...]
    """See `MicroBatch.packed`."""


class _SeededCollate:
    """Calls the user's `collate_fn`, which may draw, with seeded generators.

    `draws` is True if the first call drew random numbers.
    """

    def __init__(self, collate: Collate, seed: int) -> None:
        self.draws = False
        self._collate = collate
        self._seed = seed
        self._has_run = False

    def __call__(self, rows: list[Any], *coordinates: int | str) -> Any:
        seed = seed_from(self._seed, "collate", *coordinates)
        if self._has_run:
            seed_cpu(seed)
            return self._collate(rows)
        before = GeneratorStates.seeded(seed)
        data = self._collate(rows)
        self.draws, self._has_run = before.has_changed(), True
        return data


class MapSource:
    """Reads a map-style dataset: any micro-batch, in any order.

    If `seed_samples` is true, the generators are seeded by (seed, epoch, index) before each sample.
    If it is false, they are seeded by the first index of each micro-batch, and the dataset's
    `__getitems__` is used if it exists.

    If it is None, samples are the same as if it were true, but the generators are seeded only if
    the dataset draws random numbers:

        first micro-batch   seed each sample, and compare the generators around each sample
                            read samples again with other seeds, and compare their values
        nothing differs     from now on, compare the generators around each micro-batch
        one differs later   read that micro-batch again, and seed each sample from then on

    Samples that take long to read are always seeded, because seeding takes less time.

    `may_draw` and `collate_may_draw` are false if reading or collating never draws.
    """

    def __init__(
        self,
        dataset: Any,
        collate: Collate,
        *,
        seed: int,
        seed_samples: bool | None,
        may_draw: bool,
        collate_may_draw: bool,
    ) -> None:
        self.dataset = dataset
        self._collate = _SeededCollate(collate, seed) if collate_may_draw else collate
        self._seed = seed
        may_draw = may_draw or bool(seed_samples)
        self._seed_samples = seed_samples if may_draw else False
        self._may_draw = may_draw
        self._has_not_drawn = False  # if true, compare the generators around each micro-batch
        self._states: GeneratorStates | None = None  # before the latest micro-batch

    def __getitems__(self, request: MapRequest) -> tuple[Any, bool]:
        """Return the collated data, and whether `collate_fn` draws random numbers."""
        rows = self._read_without_draws(request) if self._has_not_drawn else None
        # In the main process (num_workers=0), a dataset draws from the same generators as the
        # training loop, and its draws must not advance them.
        collate = self._collate
        is_seeded = isinstance(collate, _SeededCollate) or (rows is None and self._may_draw)
        with _preserve_generators() if is_seeded else nullcontext():
            if rows is None:
                rows = self._read(request)
            if request.packed:
                samples = iter(rows)
                rows = [[(next(samples), size) for size in row] for row in request.packed]
            if isinstance(collate, _SeededCollate):
                data = collate(rows, request.epoch, str(request.indices[0]))
                if get_worker_info() is not None:
                    self._states = None  # seeded, and not restored
                return data, collate.draws
            return collate(rows), False

    def close(self) -> None:
        """No-op: nothing remains open between micro-batches."""

    def _read(self, request: MapRequest) -> list[Any]:
        """Read the samples of `request` with seeds, unless the dataset cannot draw."""
        if self._seed_samples is None:
            return self._read_first(request)
        if self._seed_samples:
            rows = []
            for index in request.indices:
                seed_cpu(self._seed_of("sample", request.epoch, index))
                rows.append(self.dataset[index])
            return rows
        if self._may_draw:
            seed_cpu(self._seed_of("batch", request.epoch, request.indices[0]))
        batched = getattr(self.dataset, "__getitems__", None)
        if batched is not None:
            return list(batched(list(request.indices)))
        return [self.dataset[index] for index in request.indices]

    def _read_first(self, request: MapRequest) -> list[Any]:
        """Read the first micro-batch with seeds, and determine whether the dataset has drawn."""
        rows: list[Any] = []
        draws, seconds = False, list[float]()
        for index in request.indices:
            before = GeneratorStates.seeded(self._seed_of("sample", request.epoch, index))
            began = time.perf_counter()
            rows.append(self.dataset[index])
            seconds.append(time.perf_counter() - began)
            draws = draws or before.has_changed()
        # The median, because the first samples may open files or touch new memory.
        is_slow = median(seconds) > SLOW
        self._seed_samples = draws or is_slow or self._depends_on_seed(request, rows)
        self._has_not_drawn = not self._seed_samples
        return rows

    def _depends_on_seed(self, request: MapRequest, rows: list[Any]) -> bool:
        """Read `rows` again with other seeds, and return whether any of them differs."""
        # A dataset that seeds its own generator with torch.initial_seed(), or draws in
        # torch.random.fork_rng(), leaves the states of the generators unchanged. Several seeds,
        # because a coin may fall on the same side twice.
        try:
            for trial in range(TRIALS):
                place = trial % len(rows)
                before = GeneratorStates.seeded(
                    self._seed_of("trial", trial, request.indices[place])
                )
                again = self.dataset[request.indices[place]]
                if before.has_changed() or not _is_same(rows[place], again):
                    return True
        except Exception:  # the sample can be read only once, or has no value to compare
            return True
        return False

    def _read_without_draws(self, request: MapRequest) -> list[Any] | None:
        """Read samples without seeds. Return None if the dataset has drawn random numbers."""
        before = self._states
        # The training loop may have drawn. In a worker, only the Loader draws.
        if before is None or (get_worker_info() is None and before.has_changed()):
            before = self._states = GeneratorStates.now()
        try:
            rows = [self.dataset[index] for index in request.indices]
        except Exception:
            if not before.has_changed():
                raise
        else:
            if not before.has_changed():
                return rows
        before.restore()
        self._has_not_drawn, self._seed_samples = False, True
        return None

    def _seed_of(self, what: str, epoch: int, index: Any) -> int:
        # Not by worker or rank, because the draws must be the same for any number of them.
        return seed_from(self._seed, what, epoch, str(index))


class StreamSource:
    """Reads an iterable dataset from its start and returns the requested micro-batches.

    Every worker reads this rank's full stream and collates only the micro-batches requested from
    it, so the number of workers does not affect results. If `sliced` is true, the stream is the
    same on all ranks, and `cut` selects this rank's rows of each global batch. Otherwise the stream
    is this rank's part. A step reads `chunk` samples.

    `has_states` is true if the stream can continue from the states returned with micro-batches.
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
        reports: bool,
    ) -> None:
        self.dataset = dataset
        # A checkpoint holds the state of one rank. Other ranks can continue from it only if they
        # read the same stream.
        self.has_states = sliced and can_continue(dataset)
        self._reports = reports
        self._collate = _SeededCollate(collate, seed)
        self._seed = seed
        self._cut_of, self.chunk = cut, chunk
        self._rank, self._sliced = rank, sliced
        self._drop_last = drop_last and sliced
        self._pass_number = -1
        self._micros: Iterator[tuple[MicroBatch, list[Any]]] = iter(())
        self._number = 0

    def __getitems__(self, request: StreamRequest) -> Item | None:
        """Return the requested micro-batch, or None past the end of the stream."""
        # A source only reads forwards. That suffices because torch's DataLoader sends each worker
        # increasing numbers. With persistent_workers the source outlives a pass, and restarts here.
        if request.run != self._pass_number:
            self.close()
            self._micros = self._read(request)
            self._pass_number = request.run
        found = None
        while self._number <= request.number:
            found = next(self._micros, None)
            if found is None:
                return None
            self._number += 1
        if found is None:
            return None
        micro, rows = found
        with _preserve_generators():
            number = self._cut_of.number(request.number)
            data = self._collate(rows, *self._rank_seed, request.epoch, number) if rows else None
            return replace(micro, collate_draws=self._collate.draws), data

    def close(self) -> None:
        """Drop the iterator over the user's stream."""
        self._micros, self._pass_number, self._number = iter(()), -1, 0

    @property
    def _rank_seed(self) -> tuple[int, ...]:
        return () if self._sliced else (self._rank,)

    def _read(self, request: StreamRequest) -> Iterator[tuple[MicroBatch, list[Any]]]:
        """Yield the uncollated micro-batches of a pass.

        The end of a rank's part is marked by a micro-batch of 0 rows, whose data is a stand-in. If
        the part had no samples, this micro-batch has -1 rows.
        """
        # The last sample, which is the stand-in after the end.
        newest: deque[Any] = deque(maxlen=1)
        for chunk, state in self._chunks(request, newest):
            for micro, rows in self._cut(chunk, request.epoch):
                yield replace(micro, stream=state), rows
        if not self._sliced:
            end = MicroBatch(
                epoch=request.epoch, part=0, parts=1, total=0, samples=0, rows=0 if newest else -1
            )
            yield end, list(newest)
        elif not newest:
            raise DataError(
                f"The stream {type(self.dataset).__name__} yielded no sample in epoch "
                f"{request.epoch}. Check its input files, and that its __iter__ can be called "
                "again."
            )

    def _chunks(
        self, request: StreamRequest, newest: deque[Any]
    ) -> Iterator[tuple[list[Any], Any]]:
        """Yield each step's samples and the stream's state. Put the last sample in `newest`."""
        # The stream may be a generator function, which draws between its samples. So its generator
        # states are saved while this process draws for other purposes.
        draws = SavedGenerators(seed_from(self._seed, "stream", *self._rank_seed, request.epoch))
        dataset = self.dataset
        is_first_worker = (info := get_worker_info()) is None or info.id == 0
        if request.state is not None:
            # A later pass must start from the user's own object, which has loaded nothing.
            dataset = copy.copy(dataset)
        with draws.resume(), _as_if_no_worker():
            if hasattr(dataset, "set_epoch"):
                dataset.set_epoch(request.epoch)
            if request.state is not None:
                dataset.load_state_dict(copy.deepcopy(request.state))
            stream = iter(dataset)
            if request.state is None:
                reports = self._reports and is_first_worker
                newest.extend(_skipped(stream, request.skip, type(dataset).__name__, reports))
        has_states = self.has_states
        while True:
            with draws.resume(), _as_if_no_worker():
                chunk = list(islice(stream, self.chunk))
                state = copy.deepcopy(dataset.state_dict()) if has_states else None
            # The state of a stream that draws random numbers would be incomplete without those of
            # the generators. Reading such a stream again restores both.
            if draws.advanced or not _is_plain(state):
                has_states, state = False, None
            newest.extend(chunk)
            short = len(chunk) < self.chunk
            if chunk and not (short and self._drop_last):
                yield chunk, state
            if short:
                return

    def _cut(self, chunk: list[Any], epoch: int) -> Iterator[tuple[MicroBatch, list[Any]]]:
        """Yield a step's micro-batches. An empty one gets the first row as a stand-in."""
        cuts = (self._cut_of.parts if self._sliced else self._cut_of.own_part_rows)(len(chunk))
        # A rank that reads its own part does not know the other ranks' rows yet. `until_all_finish`
        # exchanges them.
        all_have = self._cut_of.all_have(len(chunk)) if self._sliced else [True] * len(cuts)
        total_rows = self._cut_of.total_rows(len(chunk)) if self._sliced else [0] * len(cuts)
        rows = cuts[-1][1] - cuts[0][0]
        for part, (first, end) in enumerate(cuts):
            micro = MicroBatch(
                epoch=epoch,
                part=part,
                parts=len(cuts),
                total=len(chunk),
                samples=end - first,
                whole=total_rows[part],
                rows=rows,
                place=(first, end) if self._sliced else None,
                all_have=all_have[part],
            )
            yield micro, chunk[first:end] or self._cut_of.stand_in(chunk)


def may_draw(dataset: Any) -> bool:
    """Return whether reading a sample may draw random numbers. If unsure, return True."""
    if _reads_like(dataset, Subset):
        return may_draw(dataset.dataset)
    if _reads_like(dataset, ConcatDataset):
        return any(may_draw(part) for part in dataset.datasets)
    if _reads_like(dataset, FileDataset):
        return dataset.transform is not None
    if any(_reads_like(dataset, kind) for kind in (TensorDataset, list, tuple, range, Tensor)):
        return False
    form = getattr(dataset, "format", None)  # set by Hugging Face; "custom" is a user's transform
    return not (isinstance(form, dict) and form.get("type", "custom") != "custom")


def _reads_like(dataset: Any, kind: type[Any]) -> bool:
    """Return whether `dataset` is a `kind`, and not of a subclass that reads differently."""
    return isinstance(dataset, kind) and all(
        getattr(type(dataset), name, None) is getattr(kind, name, None)
        for name in ("__getitem__", "__getitems__")
    )


def _is_same(value: Any, other: Any) -> bool:
    """Return whether two samples are equal. If they cannot be compared, the error propagates."""
    leaves, structure = pytree.tree_flatten(value)
    others, other_structure = pytree.tree_flatten(other)
    if structure != other_structure:
        return False
    for one, two in zip(leaves, others, strict=True):
        equal = torch.equal(one, two) if isinstance(one, Tensor) else one == two
        if not (equal.all() if hasattr(equal, "all") else equal):  # for NumPy, == returns an array
            return False
    return True


def can_continue(dataset: Any) -> bool:
    """Return whether the stream can continue with the next sample after loading its state."""
    if not (hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")):
        return False
    # The state of a Hugging Face dataset leaves out the samples in its shuffle buffer.
    inner = [getattr(dataset, "_ex_iterable", None)]
    while inner:
        each = inner.pop()
        if hasattr(each, "buffer_size"):
            return False
        if each is not None:
            inner += [getattr(each, "ex_iterable", None), *getattr(each, "ex_iterables", ())]
    return True


def _is_plain(state: Any) -> bool:
    """Return whether `state` consists of numbers, strings, tensors, lists and dicts only."""
    if isinstance(state, dict):
        return all(map(_is_plain, [*state, *state.values()]))
    if isinstance(state, list | tuple):
        return all(map(_is_plain, state))
    return state is None or isinstance(state, str | int | float | torch.Tensor)


def _skipped(stream: Iterator[Any], count: int, name: str, reports: bool) -> Iterator[Any]:
    """Yield the first `count` samples of `stream`. Report long waits if `reports` is true."""
    reported = time.monotonic()
    for number, sample in enumerate(islice(stream, count)):
        if reports and time.monotonic() - reported > REPORT_SECONDS:
            reported = time.monotonic()
            line = f"shardwise: skipped {number:,} of {count:,} samples of {name}"
            print(line, file=sys.stderr, flush=True)
        yield sample


class WrappedStream(IterableDataset[Any]):
    """A stream that the Loader wraps around the user's `dataset`."""

    dataset: Any


def init_worker(worker_init_fn: Callable[[int], None] | None, worker: int) -> None:
    """Initialise a DataLoader worker: end it with its parent, and show the user's dataset.

    `get_worker_info().dataset` becomes the dataset that the user passed to the Loader.
    """
    torch_worker.ManagerWatchdog = _ParentWatchdog  # type: ignore[misc, assignment]
    info = get_worker_info()
    assert info is not None
    dataset = info.dataset.dataset  # type: ignore[attr-defined]
    if isinstance(dataset, WrappedStream):
        dataset = dataset.dataset
    object.__setattr__(info, "dataset", dataset)
    if worker_init_fn is not None:
        worker_init_fn(worker)


class _ParentWatchdog:
    """Ends a DataLoader worker whose parent has been killed. Replaces torch's watchdog.

    Torch's watchdog reads the parent's pid when the worker is already running. If the parent was
    killed before that, the worker would wait forever, and keep inherited connections open.
    """

    def is_alive(self) -> bool:
        """Return True, or exit if the parent is gone. torch calls this every few seconds."""
        parent = multiprocessing.parent_process()
        assert parent is not None
        # The parent of a process from a fork server is the server. A forked process cannot rely on
        # the sentinel, which other children of its parent keep open.
        served = multiprocessing.get_start_method() == "forkserver"
        if parent.is_alive() if served else os.getppid() == parent.pid:
            return True
        # A normal exit would wait until somebody reads the batches in the queue.
        os._exit(1)


def as_is(batch: Any) -> Any:
    """Return `batch` unchanged. Used as `collate_fn`, because sources return collated batches."""
    return batch


def _preserve_generators() -> AbstractContextManager[None]:
    """Context manager that restores the generators, unless this process is a DataLoader worker."""
    # In a worker only the Loader draws, so there is nothing to preserve.
    return preserved() if get_worker_info() is None else nullcontext()


@contextmanager
def _as_if_no_worker() -> Iterator[None]:
    """Make `get_worker_info()` return None inside the block."""
    # A dataset that shards itself by `get_worker_info` would give each worker only a part. But
    # every worker reads the full stream and collates only some of its micro-batches.
    info = torch_worker._worker_info
    torch_worker._worker_info = None
    try:
        yield
    finally:
        torch_worker._worker_info = info
