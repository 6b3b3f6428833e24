"""Defines the backward and step runners of an engine with `--guard`.

They override methods of the plain runners to call the guard, so that an engine without a guard
makes no additional calls.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor

from shardwise.checkpoint.atomic_folders import complete
from shardwise.checkpoint.checkpoints import Checkpoints
from shardwise.engine import diagnosis
from shardwise.engine.backward import BackwardRunner
from shardwise.engine.early_update import EarlyUpdate
from shardwise.engine.engine_state import EngineState
from shardwise.engine.step import StepRunner
from shardwise.errors import GuardError
from shardwise.guard.engine_guard import EngineGuard, check
from shardwise.guard.step_times import BACKWARD, DATA, UPDATE
from shardwise.states.parameters.residency import Residency
from shardwise.states.step_totals import StepStats, StepTotals

__all__ = ["GuardedBackward", "GuardedSteps", "attach", "check"]


class GuardedBackward(BackwardRunner):
    """Runs each backward pass of a checked step twice, to compare the results."""

    guard: EngineGuard

    def _before_autograd(self, loss: Tensor, seed: Tensor | None) -> None:
        self.guard.before_backward(loss, seed, self._dropped_pass)

    @contextmanager
    def _dropped_pass(self) -> Iterator[None]:
        """Context manager for a backward pass whose gradients are not used."""
        shown = self._objects.states.shown
        if shown is None:
            yield
            return
        # The training's own pass through the same graph follows, so its units must stay known, and
        # no bucket may be launched.
        with shown.residency.unpaced(), self._units(keep_graph=True):
            yield

    def _seed_autograd(self, *arguments: Any, **options: Any) -> None:
        self.guard.times.enter(BACKWARD)
        try:
            super()._seed_autograd(*arguments, **options)
        finally:
            self.guard.second_run.after_backward()
            self.guard.times.enter(DATA)


class GuardedSteps(StepRunner):
    """Runs steps. Checks the states' memory before each step, and the step's results afterwards."""

    guard: EngineGuard
    _searches = False
    _updates_early = False

    def step(self, max_norm: float | None, closure: Callable[[], Any] | None) -> StepStats:
        """See Engine.step."""
        self.guard.times.enter(UPDATE)
        return super().step(max_norm, closure)

    def close(self) -> None:
        """See Engine.close."""
        self.guard.close()

    def _step_often(self, closure: Callable[[], Any], max_norm: float | None) -> StepStats:
        # Losses of a line search are not those of steps, and the optimizer has used them already.
        self._searches = True
        try:
            return super()._step_often(closure, max_norm)
        finally:
            self._searches = False

    def _decide(self, totals: StepTotals) -> StepStats:
        stats = super()._decide(totals)
        if stats.skipped or self._searches:
            return stats
        if not (spike := self.guard.spikes.look_at(stats.loss, stats.grad_norm)):
            return stats
        # Losses and norms are the same on all ranks, so all of them are here.
        origin = diagnosis.largest_losses(self._accumulation, self._spec.step_group)
        words, action = f"step {self._state.steps + 1}: {spike}. {origin}", self.guard.spike_action
        if action == "stop":
            self._backward.abandon()
            raise GuardError(
                f"The guard found a spike in {words} Nothing was updated. Check these samples, or "
                "skip such steps with --guard-spikes skip."
            )
        skips = action == "skip"
        self._world.print(f"shardwise: guard: {words}{' The step is skipped.' * skips}")
        return replace(stats, skipped=skips)

    def _check_finite(self, totals: StepTotals) -> None:
        # A loss scale makes gradients overflow on purpose.
        scaled = self._state.scale.active
        if totals.weight and not scaled and not math.isfinite(totals.squared_norm):
            with self._abandoning_if_found():
                self.guard.explain_nonfinite()
            if self.guard.skips:
                cause = diagnosis.nonfinite_cause(
                    self._state.steps + 1,
                    self._state.states,
                    self._accumulation,
                    self._spec.step_group,
                )
                self._world.print(f"shardwise: guard: {cause} The step is skipped.")
                return
        super()._check_finite(totals)

    def _reduced(self, call: str, early: EarlyUpdate | None = None) -> StepTotals:
        if self._state.totals is None and self._accumulation.backwards:
            with self._abandoning_if_found():
                self.guard.check_memory()
        return super()._reduced(call, early)

    @contextmanager
    def _abandoning_if_found(self) -> Iterator[None]:
        """Discard the step if the block raises GuardError."""
        try:
            yield
        except GuardError:
            self._backward.abandon()
            raise

    def _finish(self, totals: StepTotals, stats: StepStats) -> StepStats:
        stats = super()._finish(totals, stats)
        self.guard.after_step()
        return stats


def attach(
    state: EngineState, backward: GuardedBackward, steps: GuardedSteps, checkpoints: Checkpoints
) -> str:
    """Create the guard of an engine, and set it on the engine's runners.

    Returns the guard's line of the startup summary.
    """

    def residency() -> Residency | None:
        shown = state.states.shown
        return None if shown is None else shown.residency

    def set_aside(step: int) -> list[str]:
        """Rename all checkpoints later than `step`, so that no resume loads them."""
        place, renamed = checkpoints.folder, []
        for found in complete(place) if place is not None else ():
            if found.step > step:
                found.path.rename(found.path.with_name(f"suspect-{found.path.name}"))
                renamed.append(str(found.path))
        return renamed

    spec = state.spec
    guard = EngineGuard(state, spec.data_group, spec.shard_group, residency, set_aside)
    backward.guard = steps.guard = guard
    return guard.describe()
