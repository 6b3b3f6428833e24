"""Takes elastic islands in again that have ended and were started anew.

    the others      a boundary ─▶ before the next batch: a checkpoint ─▶ "admit island k, with this"
    island k        engine.resume ─▶ "admit me" ─▶ loads it ─▶ takes part

That is where a run that is asked to end saves, too: schedulers have made their step by then, and
the weights of all are the anchor.
"""

from __future__ import annotations

import json

import torch

from shardwise.checkpoint.checkpoints import Checkpoints
from shardwise.comm import ElasticRun
from shardwise.engine.engine_state import EngineState
from shardwise.errors import ConfigError
from shardwise.world.current_batch import Batch


class IslandReturns:
    """Islands of an elastic `run` that come back to an engine, and this one where it does."""

    def __init__(self, state: EngineState, checkpoints: Checkpoints, run: ElasticRun) -> None:
        self._state = state
        self._checkpoints = checkpoints
        self._run = run
        if state.number:
            raise ConfigError(
                "--elastic-islands is for scripts with one engine, and this is the second: leave "
                "the flag out. Without it an island that ends ends the run, and --restarts goes on."
            )
        state.world.current_batch.watch(self.before_batch)

    def before_batch(self, batch: Batch) -> None:
        """A batch is about to be handed out: after a boundary let those in that wait. Collective
        then."""
        del batch
        run, every = self._run, self._state.spec.settings.island_rule.every
        if not run.link.waiting or not torch.is_grad_enabled():
            return
        ending = self._state.world.preemption.agreed
        if self._state.is_between_steps and not self._state.steps % every and not ending:
            self._admit(run)

    def _admit(self, run: ElasticRun) -> None:
        waiting = run.link.waiting
        about = self._checkpoints.save_for_return()
        if about is None:
            return
        if waiting[0] < run.link.members[0]:
            self._checkpoints.saver.leave()  # another rank leads, and claims the folders
        run.link.admit(waiting, self._state.steps, json.dumps(about).encode())

    def are_expected(self) -> None:
        """Let the launcher know that this island comes back where it has ended."""
        self._run.link.resumes = True

    @property
    def is_due(self) -> bool:
        """Whether this island is to come back."""
        return self._run.is_outside

    def come_back(self) -> None:
        """Wait until the others admit this island, and go on from where they are. What the wire has
        lost is theirs. Collective over the island."""
        answer, about = self._run.link.ask_back()
        self._checkpoints.come_back(json.loads(about))
        if (islands := self._state.states.islands) is not None:
            with torch.no_grad():
                islands.anchor.forget_losses()
        self._run.link.enter(answer)


def island_returns(state: EngineState, checkpoints: Checkpoints) -> IslandReturns | None:
    """Those of an engine with elastic islands. None without: the two refer to each other, and an
    engine that the user drops is to end at once, so that another one may save into its folder."""
    group = state.spec.world_group
    return IslandReturns(state, checkpoints, group) if isinstance(group, ElasticRun) else None
