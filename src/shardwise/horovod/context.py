"""Holds this rank's state between `hvd.init` and `hvd.shutdown`: world, thread and counters."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

from shardwise.errors import BadCall
from shardwise.horovod.script_checks import ScriptWatcher
from shardwise.timeline import recorder
from shardwise.world.step_log import StepLog
from shardwise.world.world import World

if TYPE_CHECKING:
    from shardwise.horovod.background import BackgroundThread

_current: Context | None = None


class Context:
    """State of this rank between `hvd.init` and `hvd.shutdown`.

    `hosts` lists the ranks of each host. `background` is this rank's communication thread.
    """

    def __init__(
        self, world: World, hosts: Sequence[Sequence[int]], background: BackgroundThread
    ) -> None:
        self.world = world
        self.hosts = hosts
        self.background = background
        self.counters: Counter[str] = Counter()
        """Number of unnamed operations of each kind, and of optimizers in each process set."""
        self.steps = self.commits = 0
        self.asked_size = False
        self.reduces = False
        """True if this rank has requested a reduction."""
        self.watcher: ScriptWatcher | None = None
        if world.size > 1:
            self.watcher = ScriptWatcher(
                world.rank, self.background.report_save, lambda: self.reduces
            )
        self.sample_counter = SampleCounter(world.step_log) if world.step_log.is_on else None

    def stepped(self) -> None:
        """Record a DistributedOptimizer's step, which may have to be repeated after a restart."""
        self.steps += 1
        if self.steps == 1:
            self.world.progress.kept(0, 0)  # so far progress was counted in commits
        self.world.progress.stepped(0, self.steps)
        if (recording := recorder.active) is not None:
            recording.stepped(0, self.steps)
        if self.sample_counter is not None:
            self.sample_counter.stepped(self.steps)

    def kept(self) -> None:
        """Record a commit, from which the run would resume after a restart."""
        # The launcher gives up on a run without progress. With plain optimizers no steps are
        # counted, so commits count as progress.
        if not self.steps:
            self.world.progress.stepped(0, self.commits)
        self.world.progress.kept(0, self.steps or self.commits)

    def close(self) -> None:
        """Stop the watchers and the communication thread."""
        if self.watcher is not None:
            self.watcher.close()
        if self.sample_counter is not None:
            self.sample_counter.close()
        self.background.close()


def enter(context: Context) -> None:
    """Make `context` the result of `current`. A process has at most one context."""
    global _current
    _current = context


def leave() -> None:
    """Close the current context, if any. In-flight operations fail."""
    global _current
    context, _current = _current, None
    if context is not None:
        context.close()


def is_initialized() -> bool:
    """Return whether `init` has been called and `shutdown` has not been called since."""
    return _current is not None


def current() -> Context:
    """Return the context of this rank. Raises BadCall before `init`."""
    if _current is None:
        raise BadCall("Horovod has not been initialized: call hvd.init() first.")
    return _current


@dataclass(frozen=True)
class UnknownLoss:
    """A step's entry in the step log. The loss is NaN, because only the script knows it."""

    loss: float = math.nan
    weight: float = 0.0


class SampleCounter:
    """Counts the samples that torch's DataLoaders yield, for `shardwise scale`.

    Batches that are read under torch.no_grad() are evaluation batches and are not counted.
    """

    def __init__(self, log: StepLog) -> None:
        self._log = log
        self._plain: Any = DataLoader.__iter__
        self._counting: Any = lambda loader: self._counted(self._plain(loader))
        DataLoader.__iter__ = self._counting  # type: ignore[method-assign, assignment]

    def close(self) -> None:
        """Stop counting."""
        if DataLoader.__iter__ is self._counting:
            DataLoader.__iter__ = self._plain  # type: ignore[method-assign]

    def stepped(self, steps: int) -> None:
        """Log step number `steps`. Raises SystemExit if `shardwise scale` needs no more steps."""
        self._log.stepped(0, steps, UnknownLoss())

    def _counted(self, batches: Iterator[Any]) -> Iterator[Any]:
        in_hand = False
        try:
            if torch.is_grad_enabled():
                self._log.began()
            for batch in batches:
                if in_hand := torch.is_grad_enabled():
                    leaves = pytree.tree_leaves(batch)
                    tensors = (leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim)
                    self._log.given(next((len(tensor) for tensor in tensors), 0))
                yield batch
                in_hand = False
                if torch.is_grad_enabled():
                    self._log.asked()
        finally:
            self._log.closed(in_hand=in_hand)
