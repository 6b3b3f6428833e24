"""Gives each rank its share of every total batch, in one order for any number of ranks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader

from shardwise.config import Settings
from shardwise.data import source
from shardwise.data.checks import LoaderArguments, UnknownLength
from shardwise.data.position import Position, restored
from shardwise.data.readers import Reader, part_order, reader
from shardwise.data.source import Item
from shardwise.data.steps import LoaderPass, LoaderStep
from shardwise.errors import DataError, UsageError
from shardwise.layout.sum_tree import MicroShards
from shardwise.messages.other_libraries import HintsAtAttributes
from shardwise.world.current_batch import LoaderStream, StreamShape
from shardwise.world.randomness import seed_from
from shardwise.world.world import World
from shardwise.world.world import current as current_world


class Loader(HintsAtAttributes):
    """Batches of a dataset: the TOTAL batch is `batch_size`, each rank gets its share of it. Ranks
    that split layers between them (`--tensor`) get the same one.

        for epoch in loader.epochs(3):
            for x, y in loader:
                engine.backward(loss_fn(model(x), y))
                engine.step()

    Shares are contiguous rows of the total batch, and batches arrive on `world.device`. Every
    sample comes exactly once per epoch. A rank left without rows in a short last batch gets one
    real sample as a stand-in, which weighs nothing; under `torch.no_grad()` it gets no batch, so
    that sums over what it was given are right, and has nothing to do until the others have run
    theirs. With `--micro-batch-size` a step has several
    batches, as it has with `--exact` on fewer workers than micro-shards: write
    `for step in loader.steps(): for x, y in step: ...`. Under `torch.no_grad()`
    plain iteration gives them one by one.

    dataset: map-style, or iterable. batch_size, shuffle, drop_last, num_workers, collate_fn,
    pin_memory, persistent_workers, prefetch_factor, worker_init_fn and timeout are those of
    torch's DataLoader, which does the work.

    sampler: dataset indices in total order, alike on all ranks; read as they are needed, some
    thousands ahead, so it may be endless.
    batch_sampler: its lists are total batches, of any size.

    sharding, for an iterable dataset: "slice" reads the whole stream on every rank, and in every
    DataLoader worker, and keeps a share of each total batch (decoding is repeated, the data order
    is that of one process); "dataset" takes the stream as this rank's own part, made by its
    `shard(num_shards=, index=)` where it has one, and a rank that has finished goes on with
    stand-ins until all have; "auto" is "dataset" where there is such a method with enough
    shards, else "slice". An epoch that is resumed on another number of ranks, or with another
    batch_size, ends with the parts that it began with: every rank reads all of them until then.
    The dataset never sees `get_worker_info()` while it is read: the Loader
    spreads the work over its workers, and their number changes nothing.

    seed_samples: seed torch, numpy and random by (seed, epoch, index) before each sample of a
    map-style dataset, so that augmentation is the same for any number of ranks and workers. By
    default where the dataset might draw: not for a TensorDataset, a sequence, a Hugging Face
    dataset without transform, or a Subset of such. Without it a dataset's batched fetch
    (`__getitems__`) is used, and a draw is a function of the micro-batch's first index. What
    `collate_fn` draws is always a function of the latter. A generator that the dataset made for
    itself is not seeded.

    A `for` begins the next epoch. Left early, an epoch is over, unless only its first step was
    taken and no backward used it (`next(iter(loader))` to see a batch is a look). After
    `load_state_dict` it re-enters where it was. The state is the number of samples consumed; with
    drop_last, keep batch_size on a resume.

    With `--batch worker` batch_size is that of each worker, and the total is N times as large; with
    `--tensor T` that of each replica, and N / T times.

    Raises DataError for arguments or datasets that cannot be shared out.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = None,
        *,
        shuffle: bool = False,
        drop_last: bool = False,
        sampler: Iterable[Any] | None = None,
        batch_sampler: Iterable[Iterable[Any]] | None = None,
        sharding: str = "auto",
        micro_batch_size: int | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        persistent_workers: bool = False,
        prefetch_factor: int | None = None,
        worker_init_fn: Callable[[int], None] | None = None,
        timeout: float = 0,
        name: str | None = None,
        seed_samples: bool | None = None,
    ) -> None:
        self._world = current_world()
        settings = _settings(self._world, micro_batch_size)
        asked_size = batch_size
        batch_size = _total(batch_size, batch_sampler, self._world)
        given = LoaderArguments(
            dataset=dataset,
            batch_size=batch_size,
            shuffle=shuffle,
            drop_last=drop_last,
            sampler=sampler,
            batch_sampler=batch_sampler,
            sharding=sharding,
            micro_batch_size=settings.micro_batch_size,
            shards=None if settings.exact is None else _shards(settings.exact, self._world),
            seed_samples=seed_samples,
            collate_fn=collate_fn,
            size=self._world.data_size,
            rank=self._world.data_rank,
        )
        given.check()
        self.name = name or f"Loader({type(dataset).__name__})"
        self.dataset = dataset
        self.batch_size = batch_size
        self._position = self._began = Position()  # now, and where the newest pass began
        self._reenter = False  # the next pass goes on from the position rather than anew
        self._taken = 0  # steps that the newest pass has given
        self._run = 0  # the number of the newest pass
        self._stream: LoaderStream | None = None  # the pass, as the current batch knows it
        # weak, since it calls back: dropping a Loader ends its workers at once
        self._newest: weakref.ref[LoaderPass] | None = None
        # MPS shares the host's memory: there is nothing to pin.
        self._pinned = pin_memory and self._world.device.type not in ("cpu", "mps")
        self._given, self._asked_size = given, asked_size
        self._options: dict[str, Any] = {
            "num_workers": num_workers,
            "pin_memory": self._pinned,
            "persistent_workers": persistent_workers,
            "prefetch_factor": prefetch_factor,
            "worker_init_fn": partial(source.show_own_dataset, worker_init_fn),
            "timeout": timeout,
        }
        self._build()

    def _build(self) -> None:
        """Make what reads the data, which is seeded by the run's seed, for the present mesh."""
        self._seed, self._mesh = self._world.seed, self._world.mesh
        found = part_order(self._given, self._world, self._position)
        self._reader = reader(self._given, self._world, found)
        self._plan = _plan(self._given, self._reader)
        self._torch_loader: DataLoader[Any] = DataLoader(
            self._reader.source,
            batch_sampler=_Asks(self),
            collate_fn=source.as_is,
            generator=torch.Generator().manual_seed(seed_from(self._seed, "workers")),
            **self._options,
        )

    @property
    def epoch(self) -> int:
        """The epoch of the batch given last, or the next where that one was complete."""
        return self._position.epoch

    def __len__(self) -> int:
        """Steps per epoch. Raises UnknownLength, a TypeError, for a stream without a length."""
        self._follow_mesh()
        steps = self._reader.steps
        if steps is None:
            raise UnknownLength(
                f"{self.name} does not know how many steps an epoch has: what it reads has no "
                "length, or each rank reads a part of its own."
            )
        return steps

    def __iter__(self) -> Iterator[Any]:
        """The batches of one epoch. Raises UsageError when a step has several to train on."""
        for step in self.steps():
            if len(step) > 1 and torch.is_grad_enabled():
                raise UsageError(
                    f"A step of {self.name} has {len(step)} micro-batches. Write "
                    "`for step in loader.steps():`, in it `for x, y in step: "
                    "engine.backward(...)`, then engine.step() once. To evaluate, put the loop "
                    "under torch.no_grad()."
                )
            yield from step

    def steps(self) -> Iterator[LoaderStep]:
        """The steps of one epoch; each gives its micro-batches."""
        self._begin()
        run = self._run
        for step in self._open().steps(self._position.steps):
            yield step
            self._check_newest(run)
        self._position = self._position.next_epoch(self._reader.epoch_length)

    def epochs(self, total: int) -> Iterator[int]:
        """The numbers of the epochs still to come, up to `total` in all since the beginning.

        After `load_state_dict` in mid-epoch the first is that epoch. When the body has run, its
        epoch is over, however much of it was taken.
        """
        if not isinstance(total, int) or isinstance(total, bool) or total < 0:
            raise DataError(f"epochs takes a whole number of 0 or more, not {total!r}.")
        if total and self._reenter and self._position.epoch >= total:
            over = (
                f"all {total} epochs of {self.name}" if total > 1 else f"the epoch of {self.name}"
            )
            self._world.print(f"shardwise: {over} are over where this run goes on: none is left")
        while True:
            self._settle()
            epoch = self._position.epoch
            if epoch >= total:
                return
            yield epoch
            if self._position.epoch == epoch:
                self._position = self._position.next_epoch(self._reader.epoch_length)
                self._reenter = False

    def state_dict(self) -> dict[str, int]:
        """The position: {"samples": consumed so far, "epoch": the one that the next step is of, or
        whose end of the body is still to run}.

        Where epochs may differ in length (a sampler, a stream) also offset and steps; of a stream
        also "parts", the number of parts that ranks read in this epoch (0: they read all of it),
        "part_batch", the samples of a total batch then, and "joined", whether all ranks now read
        all parts.
        """
        return self._position.state(self._reader.epoch_length)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to the position that `state` tells; the next loop goes on from there.

        Raises DataError where `state` is of something else, UsageError inside a loop.
        """
        if self._open_pass() is not None:
            raise UsageError(
                f"{self.name} is being iterated: load its state before the loop, not inside."
            )
        self._position = restored(state, self._reader.epoch_length, self.batch_size)
        self._reenter = True

    def _begin(self) -> None:
        """Start a new pass; what is left of an older one is dropped."""
        if (older := self._open_pass()) is not None:
            older.close()
        if self._seed != self._world.seed:
            self._build()  # a checkpoint was loaded, of a run with another seed
        self._follow_mesh()
        self._settle()
        self._follow_order()
        self._began, self._reenter = self._position, False
        self._taken = 0
        self._run += 1

    def _follow_mesh(self) -> None:
        """Give the shares of the present mesh, where the run was divided after this was made.

        Raises DataError where its replicas cannot share a batch.
        """
        if self._mesh == self._world.mesh or self._open_pass() is not None:
            return
        self.batch_size = _total(self._asked_size, self._given.batch_sampler, self._world)
        self._given = replace(
            self._given,
            batch_size=self.batch_size,
            size=self._world.data_size,
            rank=self._world.data_rank,
        )
        self._given.check()
        self._build()

    def _follow_order(self) -> None:
        """Read a stream in the order of the epoch that the next pass is of."""
        found = part_order(self._given, self._world, self._position)
        if found != self._reader.order:
            self._build()
        self._position = replace(self._position, order=found)

    def _settle(self) -> None:
        """Decide where the next pass begins."""
        if self._reenter or self._position.offset == 0:
            return
        trained = self._stream is not None and self._stream.trained
        if self._taken > 1 or trained:
            self._position = self._position.next_epoch(self._reader.epoch_length)
        else:
            self._position, self._reenter = self._began, self._began.offset > 0

    def _open_pass(self) -> LoaderPass | None:
        newest = self._newest() if self._newest is not None else None
        return newest if newest is not None and newest.open else None

    def _open(self) -> LoaderPass:
        opened = LoaderPass(
            self._items(),
            world=self._world,
            name=self.name,
            plan=self._plan,
            pinned=self._pinned,
            stepped=self._stepped,
        )
        self._newest = weakref.ref(opened)
        self._stream = opened.stream
        return opened

    def _stepped(self, total: int) -> None:
        self._position = self._position.stepped(total)
        self._taken += 1

    def _check_newest(self, run: int) -> None:
        if run != self._run:
            raise UsageError(
                f"A newer loop over {self.name} has begun, so this one cannot go on; "
                "make a second Loader for two loops at once."
            )

    def _items(self) -> Iterator[Item]:
        """The micro-batches of this pass as torch's DataLoader delivers them."""
        run = self._run
        try:
            yield from self._reader.delivered(iter(self._torch_loader))
        finally:
            if run == self._run:
                self._reader.close()

    def _asks(self) -> Iterator[Any]:
        return self._reader.asks(self._run, self._position)


class _Asks:
    """The `batch_sampler` of torch's DataLoader: asks anew for each pass."""

    def __init__(self, loader: Loader) -> None:
        self._loader = weakref.ref(loader)

    def __iter__(self) -> Iterator[Any]:
        loader = self._loader()
        assert loader is not None
        return loader._asks()


def _settings(world: World, micro_batch_size: int | None) -> Settings:
    """The settings of this run, with what a script says of the micro-batch."""
    if micro_batch_size is None:
        return world.settings
    return world.settle(micro_batch_size=micro_batch_size)


def _total(batch_size: int | None, batch_sampler: Any, world: World) -> int | None:
    """The total batch, where `batch_size` may be that of each worker (--batch worker)."""
    if world.settings.batch == "total" or world.data_size == 1:
        return batch_size
    if batch_sampler is not None:
        raise DataError(
            "A batch_sampler gives total batches, which --batch worker cannot make larger: give "
            "batch_size, or leave --batch out."
        )
    whole = isinstance(batch_size, int) and not isinstance(batch_size, bool)
    return batch_size * world.data_size if whole and batch_size is not None else batch_size


def _shards(exact: int, world: World) -> MicroShards:
    return MicroShards(exact, world.size, world.rank)


def _plan(given: LoaderArguments, reader: Reader) -> StreamShape:
    """The shape of a pass, for the lines at the start of a run."""
    size = given.batch_size
    count = given.cut.count(size) if size else 1
    return StreamShape(batch_size=size, micro_batches=count, steps_per_epoch=reader.steps)
