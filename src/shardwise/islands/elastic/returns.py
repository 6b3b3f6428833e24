"""Lets failed elastic islands return after a restart.

    other islands   a boundary ─▶ before the next batch: a checkpoint ─▶ "admit island k, with this"
    island k        engine.resume ─▶ "admit me" ─▶ loads it ─▶ takes part

Islands are admitted between a boundary and the next batch. This is also the point at which a run
saves when it is asked to stop: schedulers have stepped, and all islands' weights equal the anchor.
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
    """Admits returning islands, and lets this island return to the others.

    Args:
        engine: This rank's engine.
        checkpoints: Saves and loads the checkpoint for a returning island.
        run: All ranks of the participating islands.
        every: The number of steps between two boundaries.
        forget_losses: Clears this island's residual.
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
                "--elastic-islands supports only one engine per script, and this is the second. "
                "Remove the flag. Without it a failed island ends the run, and --restarts resumes "
                "it."
            )
        engine.world.current_batch.watch(self.before_batch)

    def before_batch(self, batch: Batch) -> None:
        """Admit waiting islands if the last step was a boundary. Called before each batch.

        Collective over all ranks if it admits islands.
        """
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
            return  # the save has failed; islands wait for the next boundary
        # The first rank of the lowest island claims the checkpoint folder and saves. If the
        # returning island is lowest, this role passes to it.
        if waiting[0] < run.link.members[0]:
            self._checkpoints.leave_folder()
        run.link.admit(waiting, self._engine.steps, json.dumps(about).encode())

    def are_expected(self) -> None:
        """Tell the launcher, with the next exchange, that this island can return if it fails."""
        self._run.link.resumes = True

    @property
    def is_due(self) -> bool:
        """True if this island was restarted and has not been admitted yet."""
        return self._run.is_outside

    def come_back(self) -> None:
        """Wait until the other islands admit this one, and load their checkpoint.

        Collective over the island.
        """
        answer, about = self._run.link.wait_for_admission()
        self._checkpoints.come_back(json.loads(about))
        # The residual in the checkpoint belongs to another island.
        with torch.no_grad():
            self._forget_losses()
        self._run.link.enter(answer)
