"""Lets spares join between two steps, and lets this rank join if it is a spare (`--spares`).

A spare runs the script alone up to its first training batch. It loads the other ranks' checkpoint
in `engine.resume`. Before that batch, it joins them, and all ranks lay the states out again:

    other ranks   a step ─▶ before the next batch: save ─▶ gather the states ─▶ lay them out
    spare         engine.resume ─▶ load ─────────────────▶ first batch ───────▶ lay them out
"""

from __future__ import annotations

import sys
from typing import Any

from shardwise.checkpoint.checkpoints import Checkpoints
from shardwise.comm import SurvivorGroup
from shardwise.engine.engine_state import EngineState
from shardwise.engine.user_objects import WholeStates
from shardwise.errors import CheckpointNotWritten, UsageError
from shardwise.world.current_batch import LoaderStream
from shardwise.world.survival import Survival

RETRY = 50
"""Number of steps after a failed save before spares are offered a checkpoint again."""


class SpareReturns:
    """Admits spares, and lets this rank join the others if it is a spare.

    Args:
        engine: This rank's engine.
        survival: The state of the run.
        checkpoints: Saves and loads the checkpoint for spares.
    """

    def __init__(self, engine: EngineState, survival: Survival, checkpoints: Checkpoints) -> None:
        self._engine = engine
        self._checkpoints = checkpoints
        self._survival = survival
        self._resumes, self._is_first = False, True
        self._next_try = 0
        """Number of steps before which no spare is admitted, because a save has failed."""
        survival.admit = self._before_step

    @property
    def is_due(self) -> bool:
        """True if this rank is a spare that has not joined the others yet."""
        return self._survival.group.is_waiting

    def are_expected(self) -> None:
        """Record that the script resumes, which spares need."""
        self._resumes = True

    def come_back(self) -> None:
        """Wait until the other ranks need this spare, and load their checkpoint."""
        self._checkpoints.come_back(self._survival.group.apply())

    def _before_step(self, stream: LoaderStream) -> None:
        """Join the other ranks, or admit spares if any wait. Called before a step's first batch.

        Collective if it admits spares.

        Raises UsageError if a spare could not load all of the state in this script.
        """
        group, engine = self._survival.group, self._engine
        needs = self._is_first and (group.is_waiting or engine.spec.settings.spares > 0)
        self._is_first = False
        is_due = group.joins_due and engine.is_between_steps and not engine.world.preemption.agreed
        is_due = is_due and engine.steps >= self._next_try
        if not (needs or is_due):
            return
        if lacking := self._describe_lacking(stream):
            if needs:
                raise UsageError(
                    "--spares and shardwise scale-up: a new worker must load the whole state of "
                    f"the other workers before its first training batch, but {lacking}"
                )
            # Neither a request to scale up nor a Loader that is used later may end the run.
            engine.world.say_once(f"no worker can join, because {lacking}")
        elif group.is_waiting:
            self._join(group)
        elif is_due:
            self._admit(group)

    def _describe_lacking(self, stream: LoaderStream) -> str:
        """Return why a spare would not load the whole state, or ""."""
        if not self._resumes:
            return (
                "the script has not called engine.resume(folder). Call it after engine.track(...)."
            )
        streams = [*self._engine.world.current_batch.training_streams(), stream]
        optimizers = self._engine.spec.optimizers
        return next(self._checkpoints.tracked.describe_untracked(optimizers, streams), "")

    def _join(self, group: SurvivorGroup) -> None:
        whole = self._engine.objects.gather_whole()
        state = group.enter()
        # Before the states are laid out, because a rank that is lost there has joined.
        self._engine.world.progress.joined(self._engine.steps)
        self._engine.world.limit_stops(group.stop_limit)
        number = group.members[group.rank]
        self._engine.world.step_log.join(
            self._engine.world.settings.record, number, state["logged_steps"]
        )
        self._engine.weighting.unit = state["unit"]
        self._engine.spec.gather_order.start_at(state["entries"])
        self._lay_out(whole)
        if state["wide"] and not self._engine.states.gradients.wide:
            self._engine.states.gradients.widen()

    def _admit(self, group: SurvivorGroup) -> None:
        engine, survival = self._engine, self._survival
        record, failure = None, ""
        try:
            record = self._checkpoints.save_for_return()
        except CheckpointNotWritten as error:
            # The run needs no checkpoint to continue without the spares.
            failure = f"{error} "
        if record is None:
            self._next_try = engine.steps + RETRY
            line = f"{failure}Spares wait for {RETRY} more steps, because this save failed."
            engine.world.print(f"shardwise: {line}", file=sys.stderr)
            return
        # The state of this step. If a rank is lost meanwhile, the checkpoint stays valid. The id is
        # the same on all ranks, because a spare asks another one if the first is lost.
        offer = {"id": f"{group.generation} {engine.steps} {record['path']}", "record": record}
        spares = group.steadily(lambda: group.invite(offer))
        if not spares:
            group.dismiss()
            return
        whole = group.steadily(engine.objects.gather_whole)
        while not (loss := group.admit(spares, self._common_state())).admits:
            # Another rank noticed a loss before it had all states, and lays them out without them.
            survival.continue_between_steps(loss)
        self._lay_out(whole)
        joined = [place.rank for place in spares if place.rank in group.members]
        survival.announce_joined(joined, loss, engine.steps)

    def _common_state(self) -> dict[str, Any]:
        """Return what the other ranks have agreed on, and a spare must know."""
        engine = self._engine
        return {
            "unit": engine.weighting.unit,
            "wide": engine.states.gradients.wide,
            "entries": engine.spec.gather_order.entries,
            "logged_steps": engine.world.step_log.made,
        }

    def _lay_out(self, whole: WholeStates) -> None:
        """Lay the full states out on all ranks, and forget what only some ranks know."""
        engine, survival = self._engine, self._survival
        assert survival.follow is not None
        assert survival.lay_out is not None
        survival.follow(rebuilds=True)
        # All ranks agree on these again in the next step.
        engine.buffers.go_back(([], set(), 0))
        engine.world.calls.clear()
        survival.lay_out(whole)
