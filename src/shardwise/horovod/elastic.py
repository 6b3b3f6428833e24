"""Implements `hvd.elastic`: after a restart, training resumes from the last commit.

If a rank fails or hosts change, all available ranks restart: with `shardwise run --restarts K` on
fixed hosts, or with `--nnodes MIN:MAX` on changing hosts. `run` then finds the newest commit:

    commit ─▶ file on each host     a rank dies ─▶ all restart ─▶ newest commit ─▶ sync ─▶ func

The first rank of each host writes the commit to the user's own temporary folder. The file name is
the same after every restart of a run, so every surviving host has the commit. A commit is a pickle,
which could run code, so a file that belongs to another user is not read.
"""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sized
from contextlib import suppress
from functools import wraps
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import nn, optim
from torch.utils.data import Sampler

from shardwise.checkpoint.export import disk_errors
from shardwise.errors import HorovodInternalError
from shardwise.horovod.basics import barrier
from shardwise.horovod.context import current
from shardwise.horovod.functions import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from shardwise.net import environment, private_files

__all__ = ["ElasticSampler", "HorovodInternalError", "State", "TorchState", "run"]

P = ParamSpec("P")
T = TypeVar("T")


class TorchState:
    """State that survives restarts: models, optimizers, schedulers, samplers and plain values.

    Objects that have a state_dict are saved through it; others are copied.

    Args:
        model, optimizer: A model and an optimizer, or None.
        **kwargs: Other objects and values. Each becomes an attribute, such as `state.epoch`.

    Example:
        ```python
        state = hvd.elastic.TorchState(model=model, optimizer=optimizer, epoch=0)

        @hvd.elastic.run
        def train(state):
            for state.epoch in range(state.epoch, 10):
                train_one_epoch(state)
                state.commit()

        train(state)
        ```
    """

    def __init__(self, model: Any = None, optimizer: Any = None, **kwargs: Any) -> None:
        handlers = {"model": model, "optimizer": optimizer}
        given = {name: value for name, value in handlers.items() if value is not None} | kwargs
        self._names = list(given)
        self._callbacks: list[Callable[[], None]] = []
        self._commit_file = CommitFile(os.environ)
        for name in self._names:
            setattr(self, name, given[name])
        self.save()

    def register_reset_callbacks(self, callbacks: list[Callable[[], None]]) -> None:
        """Register callbacks to run after a restart, when the set of ranks may have changed.

        Args:
            callbacks: Functions without arguments.
        """
        self._callbacks += callbacks

    def save(self) -> None:
        """Store an in-memory copy of the state, for `restore`."""
        self._saved = {name: _copied_state(getattr(self, name)) for name in self._names}

    def restore(self) -> None:
        """Restore the state from the last in-memory copy."""
        for name in self._names:
            self._take(name, copy.deepcopy(self._saved[name]))

    def commit(self) -> None:
        """Save the state to disk for a restart. All ranks must commit after the same batch."""
        self.save()
        context = current()
        context.commits += 1
        if context.world.local_rank == 0:
            written = self._saved | {_STEPS: context.steps}
            self._commit_file.write(context.commits, written)
        context.kept()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """No-op, because hosts change only when a run restarts."""

    def sync(self, root_rank: int = 0) -> None:
        """Broadcast the state of rank `root_rank` to all ranks. Collective."""
        for name in self._names:
            value = getattr(self, name)
            if isinstance(value, nn.Module):
                broadcast_parameters(value.state_dict(), root_rank)
            elif isinstance(value, optim.Optimizer):
                broadcast_optimizer_state(value, root_rank)
            else:
                self._take(name, broadcast_object(_copied_state(value), root_rank))
        self.save()

    def on_reset(self) -> None:
        """Call the registered callbacks after a restart."""
        for callback in self._callbacks:
            callback()

    def resume(self) -> bool:
        """Load the newest commit from any host of this run. Collective.

        Returns whether a commit exists.
        """
        # Hosts may have different commits. A host that joined after a restart has none.
        number, state = self._commit_file.read() or (0, {})
        numbers = allgather_object(number)
        newest = max(numbers)
        if newest == 0:
            return False
        root = numbers.index(newest)
        context = current()
        if context.world.rank == root:
            context.steps = state.pop(_STEPS)
            for name in self._names:
                self._take(name, state[name])
        context.commits = newest
        context.steps = broadcast_object(context.steps, root)
        self.sync(root)
        return True

    def forget(self) -> None:
        """Remove the commits at the end of the run."""
        barrier()
        if current().world.local_rank == 0:
            self._commit_file.remove()

    def _take(self, name: str, kept: Any) -> None:
        value = getattr(self, name)
        if _has_state(value):
            value.load_state_dict(kept)
        else:
            setattr(self, name, kept)


State = TorchState

_STEPS = "steps of the optimizer"


def _has_state(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _copied_state(value: Any) -> Any:
    return copy.deepcopy(value.state_dict() if _has_state(value) else value)


def run(
    func: Callable[Concatenate[TorchState, P], T],
) -> Callable[Concatenate[TorchState, P], T]:
    """Decorate a function so that it resumes from the run's newest commit, on all ranks.

    An error stops all ranks. With `--restarts`, the launcher then restarts them.

    Args:
        func: A function whose first argument is a TorchState.

    Returns:
        A function with the same arguments and result.
    """

    @wraps(func)
    def wrapper(state: TorchState, /, *args: P.args, **kwargs: P.kwargs) -> T:
        current().world.progress.resumes()
        if state.resume():
            current().kept()
            state.on_reset()
        else:
            state.sync()
        result = func(state, *args, **kwargs)
        state.forget()
        return result

    return wrapper


def run_name(environ: Mapping[str, str]) -> str | None:
    """Return this run's name, which restarts do not change, or None if nothing restarts it."""
    if environment.RUN_VARIABLE in environ:
        return environ[environment.RUN_VARIABLE]
    if "TORCHELASTIC_RUN_ID" not in environ:
        return None
    # torch's agent is the parent of all starts. Its start time distinguishes it from a later
    # process with the same process id.
    agent, started = os.getppid(), ""
    with suppress(OSError):
        started = Path(f"/proc/{agent}/stat").read_text().rpartition(")")[2].split()[19]
    return f"{agent}-{started}"


class CommitFile:
    """The file that stores this run's newest commit on this host."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        name = run_name(environ)
        self.path = (
            None if name is None else private_files.folder() / private_files.commit_file(name)
        )

    def write(self, number: int, state: Mapping[str, Any]) -> None:
        """Atomically replace the earlier commit with commit `number`."""
        if self.path is None:
            return
        aside = self.path.with_suffix(".new")
        aside.unlink(missing_ok=True)
        with private_files.create(aside) as file, disk_errors(file) as writer:
            torch.save({"number": number, "state": dict(state)}, writer)
        aside.rename(self.path)

    def read(self) -> tuple[int, dict[str, Any]] | None:
        """Return the commit on this host, or None. Ignores files of other users."""
        file = private_files.opened(self.path) if self.path is not None else None
        if file is None:
            return None
        with file:
            found = torch.load(file, map_location="cpu", weights_only=False)
        return found["number"], found["state"]

    def remove(self) -> None:
        """Remove the file at the end of the run."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)
            private_files.tidy()


class ElasticSampler(Sampler[int]):
    """Yields the indices that this rank reads in the current epoch.

    All ranks use the same shuffled order, which depends on (seed, epoch), and take indices in turn.
    `record_batch` counts the samples that all ranks have read. After a restart, the remaining
    samples are divided among the new ranks. If they do not divide evenly, some are repeated at the
    end.

    Args:
        dataset: Any object with a length.
        shuffle: Whether to shuffle in each epoch.
        seed: Seed of the order, the same on all ranks.

    Example:
        ```python
        sampler = hvd.elastic.ElasticSampler(dataset)
        state = hvd.elastic.TorchState(model, optimizer, sampler=sampler)
        loader = DataLoader(dataset, batch_size=32, sampler=sampler)
        for index, batch in enumerate(loader):
            train_on(batch)
            state.sampler.record_batch(index, 32)
        ```
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Start a different epoch, and reset the number of samples read.

        Call this at the end of an epoch.
        """
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Record that every rank has read a batch of `batch_size` samples."""
        del batch_idx  # part of Horovod's interface
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, and how many of its samples all ranks have read."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from `state_dict`, with the current ranks."""
        self.epoch, self.processed_num = state_dict["epoch"], state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Divide the rest of the epoch among the current ranks."""
        world = current().world
        self.rank, self.num_replicas = world.rank, world.size
        indices = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(indices)
        rest = indices[self.processed_num :]
        missing = -len(rest) % self.num_replicas
        filled = [*rest, *islice(cycle(rest), missing)]
        self.indices = filled[self.rank :: self.num_replicas]

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)

    def __len__(self) -> int:
        return len(self.indices)
