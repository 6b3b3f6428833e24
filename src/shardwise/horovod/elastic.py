"""`hvd.elastic`: restarts a run from its last commit, on the ranks that there are then.

Where ranks are lost or come, all of them start again: `shardwise run --restarts K` on hosts that
stay, `--nnodes MIN:MAX` where hosts come and go. `run` then finds the newest commit:

    commit ─▶ file on each host     a rank dies ─▶ all start again ─▶ newest commit ─▶ sync ─▶ func

The first rank of each host writes the commit into the user's own temporary folder there, under a
name that all starts of a run share and no other run has. So any surviving host has it. Values of a
script are pickled, so a commit is read only where nobody else can have written it.
"""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sized
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

    Each keyword is an attribute: `TorchState(model=model, optimizer=optimizer, epoch=0)` has
    `state.epoch`. Objects with a state_dict are saved by it, others are copied.
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
        """Register callbacks for when the run resumes after a restart, perhaps on other ranks than
        before."""
        self._callbacks += callbacks

    def save(self) -> None:
        """Copy the state in memory, for `restore`."""
        self._saved = {name: _copied_state(getattr(self, name)) for name in self._names}

    def restore(self) -> None:
        """Restore the last copy in memory."""
        for name in self._names:
            self._take(name, copy.deepcopy(self._saved[name]))

    def commit(self) -> None:
        """Save a copy that survives this process, from which a restart resumes. All ranks commit at
        the same batch."""
        self.save()
        context = current()
        context.commits += 1
        if context.world.local_rank == 0:
            written = self._saved | {_STEPS: context.steps}
            self._commit_file.write(context.commits, written)
        context.kept()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Do nothing: hosts come and go between two starts of a run, so no running rank is
        notified."""

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
        """Load the newest commit on any host of this run; returns whether there is one.
        Collective."""
        found = self._commit_file.read()
        number, state = found if found is not None else (0, {})
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
    """Decorate `func(state, ...)` so that it resumes from the run's newest commit, on all ranks.

    An error ends this start of the run: the launcher starts it again, where it was asked to.
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
    """The name that all starts of this run share; None where no launcher would start it again."""
    if environment.RUN_VARIABLE in environ:
        return environ[environment.RUN_VARIABLE]
    if "TORCHELASTIC_RUN_ID" in environ:  # torch's agent outlives the ranks that it starts
        return f"{os.getppid()}-{_start_time(os.getppid())}"
    return None


def _start_time(pid: int) -> str:
    """When a process started, which tells it from a later one with its number; "" where not
    known."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


class CommitFile:
    """The file with the newest commit of this run on this host."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        name = run_name(environ)
        self.path = (
            None if name is None else private_files.folder() / private_files.commit_file(name)
        )

    def write(self, number: int, state: Mapping[str, Any]) -> None:
        """Replace the commit before by commit `number`, atomically."""
        if self.path is None:
            return
        aside = self.path.with_suffix(".new")
        aside.unlink(missing_ok=True)
        with private_files.create(aside) as file, disk_errors(file) as writer:
            torch.save({"number": number, "state": dict(state)}, writer)
        aside.rename(self.path)

    def read(self) -> tuple[int, dict[str, Any]] | None:
        """The commit on this host, if any; a file of another user does not count."""
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
    """Samples the indices of `dataset` that this rank reads of the present epoch.

    All ranks shuffle alike, by (seed, epoch), and take turns. `record_batch` counts what all have
    read of it; after a restart the rest is shared among the ranks that there are then. The last
    turn is filled with indices of that rest, so that all ranks have as many.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Start another epoch; call it at the end of the one before, not at the beginning."""
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Record that every rank has read a batch of `batch_size` samples."""
        del batch_idx  # Horovod's interface has it
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, Any]:
        """The epoch, and how many samples all ranks have read of it."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a `state_dict`, with the ranks that there are now."""
        self.epoch, self.processed_num = state_dict["epoch"], state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Share the rest of the epoch among the ranks that there are now."""
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
