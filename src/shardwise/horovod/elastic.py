"""`hvd.elastic`: a run that goes on from its last commit, with the ranks that there are then.

Where ranks are lost or come, all of them start again: `shardwise run --restarts K` on hosts that
stay, `--nnodes MIN:MAX` where hosts come and go. `run` then finds the newest commit:

    commit ─▶ file on each host     a rank dies ─▶ all start again ─▶ newest commit ─▶ sync ─▶ func
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from torch import nn, optim

from shardwise.errors import HorovodInternalError
from shardwise.horovod.commits import Commits
from shardwise.horovod.context import current
from shardwise.horovod.objects import (
    allgather_object,
    broadcast_object,
    broadcast_parameters,
)
from shardwise.horovod.optimizer_states import broadcast_optimizer_state
from shardwise.horovod.sampler import ElasticSampler
from shardwise.horovod.waiting import barrier

__all__ = ["ElasticSampler", "HorovodInternalError", "State", "TorchState", "run"]

P = ParamSpec("P")
T = TypeVar("T")


class TorchState:
    """What a run goes on from: models, optimizers, schedulers, samplers and plain values.

    Each keyword is an attribute: `TorchState(model=model, optimizer=optimizer, epoch=0)` has
    `state.epoch`. What has a state_dict is kept by that, the rest by a copy.
    """

    def __init__(self, model: Any = None, optimizer: Any = None, **kwargs: Any) -> None:
        handlers = {"model": model, "optimizer": optimizer}
        given = {name: value for name, value in handlers.items() if value is not None} | kwargs
        self._names = list(given)
        self._callbacks: list[Callable[[], None]] = []
        self._commits = Commits(os.environ)
        for name in self._names:
            setattr(self, name, given[name])
        self.save()

    def register_reset_callbacks(self, callbacks: list[Callable[[], None]]) -> None:
        """Call these when the run goes on after a restart, perhaps on other ranks than before."""
        self._callbacks += callbacks

    def save(self) -> None:
        """Keep a copy in memory, for `restore`."""
        self._saved = {name: _kept(getattr(self, name)) for name in self._names}

    def restore(self) -> None:
        """Go back to the last copy."""
        for name in self._names:
            self._take(name, copy.deepcopy(self._saved[name]))

    def commit(self) -> None:
        """Keep a copy that outlives this process: where the run goes on after a restart. All ranks
        commit at the same batch."""
        self.save()
        context = current()
        context.commits += 1
        if context.world.local_rank == 0:
            told = self._saved | {_STEPS: context.steps}
            self._commits.write(context.commits, told)
        context.kept()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Nothing: hosts come and go between two starts of the run, so no rank is told before."""

    def sync(self, root_rank: int = 0) -> None:
        """Give all ranks what rank `root_rank` has. Collective."""
        for name in self._names:
            value = getattr(self, name)
            if isinstance(value, nn.Module):
                broadcast_parameters(value.state_dict(), root_rank)
            elif isinstance(value, optim.Optimizer):
                broadcast_optimizer_state(value, root_rank)
            else:
                self._take(name, broadcast_object(_kept(value), root_rank))
        self.save()

    def on_reset(self) -> None:
        """The run goes on after a restart."""
        for callback in self._callbacks:
            callback()

    def resume(self) -> bool:
        """Go on from the newest commit that any host of this run has; whether there is one.
        Collective."""
        found = self._commits.read()
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
        """The run has come to its end: its commits go."""
        barrier()
        if current().world.local_rank == 0:
            self._commits.remove()

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


def _kept(value: Any) -> Any:
    return copy.deepcopy(value.state_dict() if _has_state(value) else value)


def run(
    func: Callable[Concatenate[TorchState, P], T],
) -> Callable[Concatenate[TorchState, P], T]:
    """Let `func(state, ...)` go on from the newest commit of the run, alike on all ranks.

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
