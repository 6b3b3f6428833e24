"""Lets elastic islands come back that have ended and were started again.

    the others      a boundary ─▶ before the next batch: a checkpoint ─▶ "admit island k, with this"
    island k        engine.resume ─▶ "admit me" ─▶ loads it ─▶ takes part

Islands are admitted where a run that is asked to end saves, too: schedulers have made their step by
then, and the weights of all islands are the anchor.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import torch

from shardwise.errors import ConfigError
from shardwise.islands.elastic.collectives import ElasticRun
from shardwise.states.step_hooks import HookedCheckpoints, HookedEngine
from shardwise.world.current_batch import Batch


class IslandReturns:
    """Lets islands of an elastic `run` come back to an engine, and this island to the others.

    Boundaries are `every` so many steps. `forget_losses` drops what the wire has lost of this
    island's differences.
    """

    def __init__(
        self,
        engine: HookedEngine,
        checkpoints: HookedCheckpoints,
        run: ElasticRun,
        every: int,
        forget_losses: Callable[[], None],
    ) -> None:
        self._every = every
        self._forget_losses = forget_losses
        self._engine = engine
        self._checkpoints = checkpoints
        self._run = run
        if engine.number:
            raise ConfigError(
                "--elastic-islands is for scripts with one engine, and this is the second: leave "
                "the flag out. Without it an island that ends ends the run, and --restarts goes on."
            )
        engine.world.current_batch.watch(self.before_batch)

    def before_batch(self, batch: Batch) -> None:
        """Admit waiting islands if the last step was a boundary. Called before each batch;
        collective then."""
        del batch
        run = self._run
        if not run.link.waiting or not torch.is_grad_enabled():
            return
        ending = self._engine.world.preemption.agreed
        if self._engine.is_between_steps and not self._engine.steps % self._every and not ending:
            self._admit(run)

    def _admit(self, run: ElasticRun) -> None:
        waiting = run.link.waiting
        about = self._checkpoints.save_for_return()
        if about is None:
            return
        # The first rank of the lowest island leads: it claims the folder, and saves.
        if waiting[0] < run.link.members[0]:
            self._checkpoints.leave_folder()
        run.link.admit(waiting, self._engine.steps, json.dumps(about).encode())

    def are_expected(self) -> None:
        """Tell the launcher that this island can come back after it has ended."""
        self._run.link.resumes = True

    @property
    def is_due(self) -> bool:
        """Whether this island is to come back."""
        return self._run.is_outside

    def come_back(self) -> None:
        """Wait until the others admit this island, and load what they saved. Collective over the
        island."""
        answer, about = self._run.link.ask_back()
        self._checkpoints.come_back(json.loads(about))
        with torch.no_grad():
            self._forget_losses()
        self._run.link.enter(answer)
