"""The Loader, which gives each rank its share of every global batch.

The order of the samples does not depend on the number of ranks.
"""

from __future__ import annotations

import multiprocessing.util
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from torch.utils.data._utils.pin_memory import pin_memory

from shardwise.data import source
from shardwise.data.checks import LoaderArguments, UnknownLength
from shardwise.data.packing.packing import Packing
from shardwise.data.position import Position, restored
from shardwise.data.readers import Reader, choose_part_order, reader
from shardwise.data.source import Item, MicroBatch
from shardwise.data.steps import LoaderPass, LoaderStep
from shardwise.data.token_budget import TokenBudget
from shardwise.errors import DataError, UsageError
from shardwise.layout.sum_tree import MicroShards
from shardwise.messages.other_libraries import HintsAtAttributes
from shardwise.world.current_batch import LoaderStream, StreamShape
from shardwise.world.randomness import seed_from
from shardwise.world.sequence_parts import SequenceDim
from shardwise.world.world import World
from shardwise.world.world import current as current_world


class Loader(HintsAtAttributes):
    """Iterates over a dataset. `batch_size` is the TOTAL batch, of which each rank gets its share.

    Shares are contiguous rows of the total batch, and batches are on `world.device`. Every sample
    is used exactly once per epoch. Ranks that split layers (`--tensor`) get identical batches.

    A `for` loop runs the next epoch. Leaving it early completes that epoch, unless only its first
    step was taken and no backward pass used it. So `next(iter(loader))` only looks at a batch.
    After `load_state_dict`, the next loop continues from the saved position. With drop_last, do not
    change batch_size when resuming.

    A rank without rows in a short last batch gets one real sample as a stand-in, whose weight is
    zero. Under `torch.no_grad()` it gets no batch instead, so that sums over batches remain
    correct.

    With `--micro-batch-size`, or with `--exact` on fewer workers than micro-shards, a step has
    several batches. To train on them, write `for step in loader.steps(): for x, y in step: ...`.
    Under `torch.no_grad()`, plain iteration yields them one by one.

    `get_worker_info()` returns None while the dataset is read, because the Loader itself
    distributes the work to its DataLoader workers. Their number does not affect any result.

    Args:
        dataset: A map-style or an iterable dataset. Every rank must pass the same, complete
            dataset.
        batch_size: Number of samples in a total batch. With `--batch worker`, the number per
            worker, or per replica if `--tensor` is also set.
        shuffle: Shuffle a map-style dataset. The order depends only on (seed, epoch, length).
        drop_last: Drop the last batch if it is shorter than batch_size.
        sampler: Dataset indices for all ranks together, the same on every rank. It may be infinite,
            because it is read only a few thousand indices ahead.
        batch_sampler: Lists of dataset indices, the same on all ranks. Each list is a total batch
            and may have any size.
        sharding: How ranks share an iterable dataset. With "slice", every rank and every DataLoader
            worker reads the full stream and selects its share of each total batch. The order is
            that of a single process, but decoding is repeated. With "dataset", every rank reads
            only its own part: `dataset.shard(num_shards=, index=)` if that method exists, else the
            unchanged dataset. A rank whose part is exhausted continues with stand-ins until all
            parts are exhausted. If an epoch is resumed with a different world size or batch_size,
            its parts stay in the same order until it ends. "auto" is "dataset" if the dataset has a
            method `shard` and enough shards, else "slice".
        tokens: Maximum number of tokens in a total batch, in place of batch_size. Samples are taken
            in order, and a step ends before the sample that would exceed the maximum. The steps
            depend only on (seed, epoch, lengths). A step's samples are divided so that all ranks
            have about the same work, so shares are not contiguous rows. Overridden by
            `--step-tokens`, which is also the default if length is passed.
        length: With tokens: a function that returns the number of tokens in a sample, or one length
            per sample. Each rank calls the function for a part of the dataset, before the first
            epoch.
        length_cache: With a function as length: file that stores the lengths for later runs. They
            are computed again if the dataset or the function has changed. Only the first rank reads
            and writes the file.
        micro_batch_tokens: With tokens: maximum number of tokens in a micro-batch, counted after
            padding all its rows to the longest. Overridden by the run's setting. If it is set, loop
            over `loader.steps()`.
        cost: With tokens: a function that returns the work for a sample of L tokens, used to
            balance ranks. Default: L. For layers of width d with attention, the work is about
            `L + L * L / (6 * d)`.
        pack: With tokens: a `Packing`, to put documents end to end into rows of a fixed length
            instead of padding them. tokens must be a multiple of that length.
        micro_batch_size: Number of rows per micro-batch. Overrides the run's setting.
        num_workers: See `torch.utils.data.DataLoader`, which reads the data.
        collate_fn: See `torch.utils.data.DataLoader`.
        pin_memory: See `torch.utils.data.DataLoader`.
        persistent_workers: See `torch.utils.data.DataLoader`.
        prefetch_factor: See `torch.utils.data.DataLoader`.
        worker_init_fn: See `torch.utils.data.DataLoader`.
        timeout: See `torch.utils.data.DataLoader`.
        name: Name of the Loader in messages (default: `Loader(<type of the dataset>)`).
        seed_samples: Seed torch, numpy and random by (seed, epoch, index) before each sample of a
            map-style dataset, so that augmentation is the same for any number of ranks and
            workers. By default, samples that are read in less than 0.5 ms are only seeded if the
            dataset draws random numbers, with the same results. To find out, the Loader reads 16
            samples of the first micro-batch again, in each process that reads. If a dataset first
            draws in a later micro-batch, the Loader reads that micro-batch again. Write True if
            samples must not be read twice, for example because reading changes the dataset. If
            False, the dataset's `__getitems__` is used, and random numbers depend on the first
            index of the micro-batch. In `collate_fn`, they always do. Generators that the dataset
            itself creates are not seeded.
        sequence_dim: With `--context`, the dimension of a batch's tensors along which sequences are
            split, such as 0 for (length, rows, ...), or a dict from names or positions in the batch
            to dimensions. None in the dict: the tensor is not split. Default: 1.

    Raises:
        DataError: If an argument is invalid, or if the dataset cannot be shared between ranks.

    Example:
        ```python
        loader = sw.Loader(dataset, batch_size=64, shuffle=True)
        for epoch in loader.epochs(3):
            for x, y in loader:
                engine.backward(loss_fn(model(x), y))
                engine.step()
        ```
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
        tokens: int | None = None,
        length: Callable[[Any], int] | Sequence[int] | None = None,
        length_cache: str | Path | None = None,
        micro_batch_tokens: int | None = None,
        cost: Callable[[int], float] | None = None,
        pack: Packing | None = None,
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
        sequence_dim: SequenceDim | None = None,
    ) -> None:
        self._world = current_world()
        self._sequence_dim = sequence_dim
        settings = self._world.settings
        if settings.step_tokens is not None:
            tokens = self._tokens_of_run(settings.step_tokens, tokens, length)
        # Values in the script become the run's settings.
        micro = {"micro_batch_size": micro_batch_size}
        if tokens is not None:
            micro["micro_batch_tokens"] = micro_batch_tokens
        if keywords := {name: value for name, value in micro.items() if value is not None}:
            settings = self._world.settle(**keywords)
        if tokens is not None:
            micro_batch_tokens = settings.micro_batch_tokens
        elif settings.micro_batch_tokens is not None:
            self._world.say_once(
                f"--micro-batch-tokens {settings.micro_batch_tokens} does not apply to a Loader "
                "without tokens="
            )
        requested_size = batch_size
        budget = _budget(tokens, length, length_cache, micro_batch_tokens, cost, pack, self._world)
        batch_size = _total(batch_size, batch_sampler, self._world)
        arguments = LoaderArguments(
            dataset=dataset,
            batch_size=batch_size,
            shuffle=shuffle,
            drop_last=drop_last,
            sampler=sampler,
            batch_sampler=batch_sampler,
            sharding=sharding,
            micro_batch_size=settings.micro_batch_size,
            shards=_shards(self._world),
            seed_samples=seed_samples,
            collate_fn=collate_fn,
            size=self._world.data_size,
            rank=self._world.data_rank,
            budget=budget,
        )
        arguments.check()
        if self._world.survival is not None:
            _check_repeatable(arguments)
        self.name = name or f"Loader({type(dataset).__name__})"
        self.dataset = dataset
        self.batch_size = batch_size
        self._position = self._pass_start = Position()  # now, and at the start of the latest pass
        self._step_start = Position()  # at the start of the latest step
        self._resumes = False  # True if the next pass continues from the position
        self._taken = 0  # number of steps that the latest pass has yielded
        self._pass_number = 0  # number of the latest pass
        self._stream: LoaderStream | None = (
            None  # stream of the latest pass in the world's current batch
        )
        # A weak reference, because a pass holds a method of the Loader. With a reference cycle, the
        # workers of a dropped Loader would run until the garbage collector runs.
        self._latest_pass: weakref.ref[LoaderPass] | None = None
        # MPS shares the host's memory, so there is nothing to pin.
        self._pinned = pin_memory and self._world.device.type not in ("cpu", "mps")
        self._arguments, self._requested_size = arguments, requested_size
        self._options: dict[str, Any] = {
            "num_workers": num_workers,
            "pin_memory": self._pinned,
            "persistent_workers": persistent_workers,
            "prefetch_factor": prefetch_factor,
            "worker_init_fn": partial(source.init_worker, worker_init_fn),
            "timeout": timeout,
        }
        self._build()

    def _tokens_of_run(self, run: int, own: int | None, length: Any) -> int | None:
        """Return the token budget of a step if `--step-tokens` is set to `run`."""
        if own is None and length is None:
            self._world.say_once(f"--step-tokens {run} does not apply to a Loader without length=")
            return None
        if own not in (None, run):
            self._world.say_once(f"--step-tokens {run} replaces tokens={own} in the script")
        return run

    def _build(self) -> None:
        """Create the reader and torch's DataLoader for the current seed, mesh and position."""
        self._seed, self._mesh = self._world.seed, self._world.mesh
        self._generation = self._world.generation
        part_order = choose_part_order(self._arguments, self._world, self._position)
        self._reader = reader(self._arguments, self._world, part_order)
        self._plan = _plan(self._arguments, self._reader)
        self._torch_loader: DataLoader[Any] = DataLoader(
            self._reader.source,
            batch_sampler=_PassSampler(self),
            collate_fn=source.as_is,
            generator=torch.Generator().manual_seed(seed_from(self._seed, "workers")),
            **self._options,
        )

    @property
    def epoch(self) -> int:
        """The epoch of the last batch or, if that epoch is complete, the next one."""
        return self._position.epoch

    def __len__(self) -> int:
        """Return the number of steps per epoch.

        Raises:
            UnknownLength: If the dataset is a stream without a length. It is also a TypeError.
        """
        self._follow_mesh()
        steps = self._reader.steps
        if steps is None:
            raise UnknownLength(
                f"{self.name} does not know how many steps an epoch has: its dataset or sampler "
                "has no length, each rank reads its own part of a stream, or tokens closes the "
                "steps. Count the steps in the loop instead of calling len."
            )
        return steps

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of one epoch.

        Raises:
            UsageError: If a step has several micro-batches to train on: use `steps` instead.
        """
        self._check_plain()
        for step in self.steps():
            if len(step) > 1 and torch.is_grad_enabled():
                raise UsageError(
                    f"A step of {self.name} has {len(step)} micro-batches. Write "
                    "`for step in loader.steps():`, inside it `for x, y in step: "
                    "engine.backward(...)`, then engine.step() once. To evaluate, put the loop "
                    "under torch.no_grad()."
                )
            step.plain = True
            yield from step

    def _check_plain(self) -> None:
        """Raise UsageError if a step could have several micro-batches after ranks were lost."""
        if self._world.survival is None or not torch.is_grad_enabled():
            return
        exact, size = self._world.settings.exact, self._arguments.micro_batch_size
        if exact is not None or (size is not None and (self.batch_size or 0) > size):
            cause = f"--micro-batch-size {size}" if exact is None else f"--exact {exact}"
            raise UsageError(
                f"With {cause}, a step of {self.name} has several micro-batches on each worker "
                "once --survive has continued with fewer workers. Write `for step in "
                "loader.steps():`, inside it `for x, y in step: engine.backward(...)`, then "
                "engine.step() once."
            )

    def steps(self) -> Iterator[LoaderStep]:
        """Yield the steps of one epoch. Iterate over each step to get its micro-batches.

        Raises:
            UsageError: If a newer loop over this Loader has started, or if the loop over a step
                ended before its last micro-batch.

        Example:
            ```python
            for step in loader.steps():
                for x, y in step:
                    engine.backward(loss_fn(model(x), y))
                engine.step()
            ```
        """
        self._begin()
        run = self._pass_number
        opened = self._open()
        for step in opened.steps(self._position.steps):
            yield step
            if run != self._pass_number:
                raise UsageError(
                    f"A newer loop over {self.name} has begun, so this one cannot continue. "
                    "Make a second Loader to run two loops at once."
                )
        opened.announce_tokens(self._position.epoch)
        self._position = self._position.next_epoch(self._reader.epoch_length)

    def epochs(self, total: int) -> Iterator[int]:
        """Yield the numbers of the remaining epochs, from the current one to `total` - 1.

        After `load_state_dict` in the middle of an epoch, the first number is that epoch. An epoch
        is complete once the loop body has run, even if some of its batches were not used.

        Args:
            total: Number of epochs in the complete training run, including epochs before a resume.

        Raises:
            DataError: If `total` is not a non-negative integer.
        """
        if not isinstance(total, int) or isinstance(total, bool) or total < 0:
            raise DataError(f"epochs must be an integer of 0 or more, not {total!r}.")
        if total and self._resumes and self._position.epoch >= total:
            over = (
                f"all {total} epochs of {self.name}" if total > 1 else f"the epoch of {self.name}"
            )
            self._world.print(f"shardwise: {over} are over at the resumed position: none is left")
        while True:
            self._settle_position()
            epoch = self._position.epoch
            if epoch >= total:
                return
            yield epoch
            if self._position.epoch == epoch:
                self._position = self._position.next_epoch(self._reader.epoch_length)
                self._resumes = False

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data. Checkpoints store it for tracked Loaders.

        Returns:
            A dict of ints and, for a stream, its state:

            - "samples": number of samples consumed since training started.
            - "epoch": the epoch of the next step, or the current epoch if its steps are complete
                but its loop body is not.
            - "offset" and "steps", if epochs may differ in length (a sampler, a stream): number of
                samples and steps consumed in this epoch.
            - "parts", for a stream: the number of parts that ranks read in this epoch, or 0 if
                every rank reads the full stream.
            - "part_batch", for a stream: number of samples in a total batch of these parts.
            - "joined", for a stream: 1 if each rank now reads all parts, else 0.
            - "stream": the result of the dataset's `state_dict`, if the Loader can use it.
        """
        return self._position.state(self._reader.epoch_length)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the position from `state`. The next loop continues from there.

        Args:
            state: A result of `state_dict`.

        Raises:
            DataError: If `state` is not the state of a Loader.
            UsageError: If a loop over this Loader is running.
        """
        if self._open_pass() is not None:
            raise UsageError(
                f"A loop over {self.name} is running: load its state before the loop, not inside."
            )
        self._position = restored(state, self._reader.epoch_length, self.batch_size)
        self._resumes = True

    def _begin(self) -> None:
        """Start a new pass, and discard the rest of the previous one."""
        if (older := self._open_pass()) is not None:
            older.close()
        if self._seed != self._world.seed:
            self._build()  # a checkpoint of a run with a different seed was loaded
        self._follow_mesh()
        self._settle_position()
        # Only now that the position is known, because an epoch that has begun keeps its order of
        # parts.
        part_order = choose_part_order(self._arguments, self._world, self._position)
        if part_order != self._reader.order:
            self._build()
        self._position = replace(self._position, order=part_order)
        self._pass_start, self._resumes = self._position, False
        self._taken = 0
        self._pass_number += 1

    def _follow_mesh(self) -> None:
        """Use this rank's share on the current mesh, if the mesh changed after `__init__`.

        Raises DataError if the replicas of the new mesh cannot share a batch.
        """
        # A Loader may be created before the engine, and only the engine knows the tensor and
        # pipeline axes. An open pass keeps its shares until it ends.
        if self._is_shared_now or self._open_pass() is not None:
            return
        self._share_anew()

    @property
    def _is_shared_now(self) -> bool:
        """True if the rows are divided among the current ranks. The same on all ranks."""
        # After a loss and an admission, the size may be the same as before, and only some ranks may
        # have another number. But all must divide the rows again, because this is collective after
        # an admission.
        return self._mesh == self._world.mesh and self._generation == self._world.generation

    def _share_anew(self) -> None:
        """Continue with this rank's share on the current mesh."""
        self.batch_size = _total(self._requested_size, self._arguments.batch_sampler, self._world)
        self._arguments = replace(
            self._arguments,
            batch_size=self.batch_size,
            size=self._world.data_size,
            rank=self._world.data_rank,
            shards=_shards(self._world),
        )
        self._arguments.check()
        self._build()

    def _settle_position(self) -> None:
        """Set the start of the next pass: the resumed position, or the start of an epoch."""
        if self._resumes or self._position.offset == 0:
            return
        # The older pass was left early. If it only looked at the first batch, restart it.
        trained = self._stream is not None and self._stream.trained
        if self._taken > 1 or trained:
            self._position = self._position.next_epoch(self._reader.epoch_length)
        else:
            self._position, self._resumes = self._pass_start, self._pass_start.offset > 0

    def _open_pass(self) -> LoaderPass | None:
        newest = self._latest_pass() if self._latest_pass is not None else None
        return newest if newest is not None and newest.open else None

    def _open(self) -> LoaderPass:
        opened = LoaderPass(
            self._items(),
            world=self._world,
            name=self.name,
            plan=self._plan,
            pinned=self._pinned,
            stepped=self._stepped,
            shared_again=self._shared_again,
            sequence_dim=self._sequence_dim,
        )
        self._latest_pass = weakref.ref(opened)
        self._stream = opened.stream
        return opened

    def _stepped(self, micro: MicroBatch) -> None:
        self._step_start = self._position
        self._position = self._position.stepped(micro.total, micro.stream)
        self._taken += 1

    def _shared_again(self, repeats: bool) -> Iterator[Item] | None:
        """Divide the rows again after a loss, as described for `shared_again` in LoaderPass."""
        if repeats:
            self._position = self._step_start
            self._taken -= 1
        elif self._is_shared_now:
            return None
        self._share_anew()
        return self._items()

    def _items(self) -> Iterator[Item]:
        """Yield this pass's micro-batches, in the order of their requests."""
        run = self._pass_number
        iterator: Iterator[Any]
        if self._torch_loader.num_workers:
            # Workers send tensors through sockets in a temporary folder. They inherit this one,
            # which this process removes. A killed worker would leave its own folder behind.
            multiprocessing.util.get_temp_dir()
            iterator = iter(self._torch_loader)
        else:
            # Without workers, torch's DataLoader would only call the source, with more overhead.
            iterator = map(self._reader.source.__getitems__, self.requests())
            if self._pinned:
                iterator = map(pin_memory, iterator)
        try:
            yield from self._reader.delivered(iterator)
        except (EOFError, ConnectionError) as error:
            # These also come from a dataset, in which case all workers are alive.
            for worker in getattr(iterator, "_workers", ()):
                worker.join(0.5)
                if worker.exitcode:
                    raise DataError(
                        f"A worker process of the Loader (pid {worker.pid}) ended with exit code "
                        f"{worker.exitcode} while it sent a batch. The kernel kills processes if "
                        "memory runs out (see dmesg): use fewer workers (num_workers=) or smaller "
                        "batches."
                    ) from error
            raise
        finally:
            if run == self._pass_number:  # otherwise a newer pass reads from the same workers
                self._reader.close()

    def requests(self) -> Iterator[Any]:
        """Yield the requests that the latest pass sends to the workers of torch's DataLoader."""
        return self._reader.requests_for(self._pass_number, self._position)


class _PassSampler:
    """The `batch_sampler` of torch's DataLoader. It is iterated at the start of each pass."""

    def __init__(self, loader: Loader) -> None:
        # A weak reference, because the Loader holds the DataLoader, which holds this object. A
        # reference cycle would keep the workers running until the garbage collector runs.
        self._loader = weakref.ref(loader)

    def __iter__(self) -> Iterator[Any]:
        loader = self._loader()
        assert loader is not None
        return loader.requests()


def _total(batch_size: int | None, batch_sampler: Any, world: World) -> int | None:
    """Return the size of a global batch. With `--batch worker`, `batch_size` is per worker."""
    if world.settings.batch == "total" or world.data_size == 1:
        return batch_size
    if batch_sampler is not None:
        raise DataError(
            "A batch_sampler already returns total batches, so --batch worker cannot be applied "
            "to it. Pass batch_size, or leave --batch out."
        )
    whole = isinstance(batch_size, int) and not isinstance(batch_size, bool)
    return batch_size * world.data_size if whole and batch_size is not None else batch_size


def _budget(
    tokens: int | None,
    length: Callable[[Any], int] | Sequence[int] | None,
    length_cache: str | Path | None,
    micro_batch_tokens: int | None,
    cost: Callable[[int], float] | None,
    pack: Packing | None,
    world: World,
) -> TokenBudget | None:
    """Return the token budget of a step, or None if `tokens` is None."""
    if pack is not None and not isinstance(pack, Packing):
        raise DataError(
            f"pack={pack!r} does not say how long rows are: write pack=sw.Packing(model, row=2048)."
        )
    others = {
        "length": length,
        "length_cache": length_cache,
        "micro_batch_tokens": micro_batch_tokens,
        "cost": cost,
        "pack": pack,
    }
    if tokens is None:
        if extra := [name for name, value in others.items() if value is not None]:
            raise DataError(
                f"{' and '.join(extra)} applies only to a Loader with tokens=, the budget of a "
                "step: pass tokens too, or leave it out."
            )
        return None
    if length is None:
        raise DataError(
            "tokens needs the length of each sample: write length=lambda sample: "
            "len(sample['input_ids'])."
        )
    if world.settings.batch == "worker" and world.data_size > 1:
        raise DataError(
            "tokens is the budget of a total batch, which --batch worker cannot make larger. "
            "Leave --batch out."
        )
    if length_cache is not None and not callable(length):
        raise DataError(
            "length_cache keeps the results of a function, but length is already a list of "
            "lengths: leave length_cache out."
        )
    return TokenBudget(tokens, length, micro_batch_tokens, cost, packing=pack, cache=length_cache)


def _check_repeatable(arguments: LoaderArguments) -> None:
    """Raise DataError if this Loader cannot repeat a step, which --survive requires."""
    unsupported = {
        "sampler=": arguments.sampler is not None,
        "batch_sampler=": arguments.batch_sampler is not None,
        "tokens=": arguments.budget is not None,
        "an iterable dataset": arguments.stream,
    }
    if named := [name for name, is_used in unsupported.items() if is_used]:
        raise DataError(
            f"A Loader with {named[0]} cannot hand out the rows of a step again, which --survive "
            "needs after a loss. Use a dataset with __len__ and __getitem__, and batch_size=, or "
            "start without --survive."
        )


def _shards(world: World) -> MicroShards | None:
    exact = world.settings.exact
    return None if exact is None else MicroShards(exact, world.size, world.rank)


def _plan(arguments: LoaderArguments, reader: Reader) -> StreamShape:
    """Return the batch size and step count of a pass, for the startup summary."""
    size = arguments.batch_size
    count = arguments.cut.count(size) if size else 1
    tokens = None if arguments.budget is None else arguments.budget.tokens
    return StreamShape(
        batch_size=size, micro_batches=count, steps_per_epoch=reader.steps, tokens=tokens
    )
