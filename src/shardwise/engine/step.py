"""Makes a step: reduces gradients, exchanges totals, clips, updates, publishes, clears.

reduce      wait for the sums that are still being made
exchange    one small collective: weights, losses, norm, what was used
(delay)     where islands are behind: another step's sums in their place (bounded_staleness.py)
(between)   whole gradients for the user: read, changed
decide      skip the step, stop the run, or compute the factor that clips and averages
update      each bucket (states/optimizer_state), then its all-gather where one is needed
clear       the gradients; seed what is drawn next
equal       parameters between islands, where there are several (islands.py)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from shardwise.checkpoint.saver import CheckpointSaver
from shardwise.comm import Handle
from shardwise.engine import closures, consistency, diagnosis, start_lines, usage_checks
from shardwise.engine.backward import BackwardRunner
from shardwise.engine.bounded_staleness import BoundedStaleness
from shardwise.engine.engine_state import EngineState
from shardwise.engine.exchange import exchange, over_stages, squared_norm
from shardwise.engine.islands import Islands
from shardwise.engine.random_state import RandomState
from shardwise.engine.recording import Recording
from shardwise.engine.step_statistics import StepStats, StepTotals
from shardwise.errors import ShardwiseError, UsageError
from shardwise.parallel.pipeline import LayerTimes
from shardwise.states.gradients.gradient_norm import clip_coefficient
from shardwise.states.whole_gradients import WholeGradients
from shardwise.timeline import recorder, span


class StepRunner:
    """Makes the steps of an engine; `timing` measures layers, `recording` writes down
    what each step computed, where that is asked for."""

    def __init__(
        self,
        state: EngineState,
        backward: BackwardRunner,
        randoms: RandomState,
        saver: CheckpointSaver,
        timing: LayerTimes | None = None,
        recording: Recording | None = None,
    ) -> None:
        self._state = state
        self._world = state.world
        self._spec = state.spec
        self._objects = state.objects
        self._accumulation = state.accumulation
        self._backward = backward
        self._randoms = randoms
        self._saver = saver
        self._timing = timing
        self._recording = recording
        self._islands = Islands(state)
        self._staleness = BoundedStaleness(state)
        self._options = consistency.OptionChecksum(state.spec.optimizers)
        self._skips = diagnosis.Skips(scaled=state.scale.active)

    # -- what the engine calls --------------------------------------------------------------

    def step(self, max_norm: float | None, closure: Callable[[], Any] | None) -> StepStats:
        """See Engine.step."""
        states = self._objects.states
        if closure is None:
            self._check_begun("engine.step()")
        self._accumulation.stepping = self._accumulation.backwards > 0
        if max_norm is not None and not max_norm > 0:
            raise UsageError(f"max_norm takes a number above 0, not {max_norm}.")
        if closure is not None:
            scaled = self._state.scale.active
            closures.check(self._spec, states, self._accumulation, scaled=scaled)
            if closures.asks_often(states):
                return self._step_often(closure, max_norm)
            with torch.enable_grad():
                closure()
        closures.check_given(self._objects.states, given=closure is not None)
        # From the exchange on all ranks have the same totals, so that they decide alike: to skip,
        # to raise, or to update, whose gathers take all of them.
        totals = self._reduced("engine.step()")
        stats = self._decide(totals)
        if not stats.skipped:
            self._call_before_step()
            self._update(totals, stats, max_norm)
            usage_checks.call_after_step(self._spec.optimizers)
        return self._finish(totals, stats)

    def reduce(self) -> float:
        """See Engine.reduce."""
        totals = self._reduced("engine.reduce()")
        return math.sqrt(totals.squared_norm) * self._scale_of(totals)

    @contextmanager
    def full_gradients(self) -> Iterator[None]:
        """See Engine.full_gradients."""
        self._refuse_parts("engine.full_gradients()")
        totals = self._reduced("engine.full_gradients()")
        states, spec = self._objects.states, self._spec
        whole = WholeGradients(
            states.parameters,
            states.gradients,
            spec.shard_group,
            spec.step_group if spec.staleness is None else spec.world_group,
            totals.used,
            self._scale_of(totals) or 1.0,
            scattered=spec.placement.is_sharded("optimizer"),
        )
        whole.show()
        with self._backward.abandoning():
            yield
            used = whole.take()
        states.gradients.guard()
        squared = squared_norm(
            self._state.aggregation, states.gradients, spec.step_group, spec.shard_group.copies
        )
        self._state.totals = replace(totals, used=used, squared_norm=squared)

    def zero_grad(self) -> None:
        """See Engine.zero_grad."""
        if self._accumulation.backwards:
            self._backward.abandon()
            if self._spec.micro_shards is not None:
                # What is drawn depends on the micro-shard, and the first is next.
                self._randoms.reseed()

    # -- checks -----------------------------------------------------------------------------

    def _check_begun(self, call: str) -> None:
        """Raise UsageError where there is nothing that `call` could sum up, or no place for it."""
        self._world.draws.check_outside(call)
        if not self._accumulation.backwards:
            raise UsageError(
                f"{call} without engine.backward(loss) since the last step: call backward first."
            )

    def _refuse_parts(self, call: str) -> None:
        """Raise UsageError for a `call` that takes whole models where ranks have parts."""
        for name, apart in (("tensor", self._spec.tensor), ("pipeline", self._spec.pipeline)):
            if apart is not None:
                size = getattr(self._world.settings, name)
                raise UsageError(
                    f"{call} with --{name} {size}: no worker has the whole of a gradient. "
                    f"engine.reduce() returns the norm of all; for more, start without --{name}."
                )

    def _check_consistent(self, totals: StepTotals) -> None:
        """Raise, on all ranks, where their options, losses or parameters differ; the step is
        forgotten then."""
        try:
            if not totals.alike:
                raise self._options.difference(self._spec.step_group)
            if math.isnan(totals.divisor):
                raise UsageError(
                    'Losses of this step are sums on some ranks (reduction="sum" or "ddp") and '
                    "means, or the other kind of sums, on others: write them in one way."
                )
            if totals.is_mixed:
                self._tell_mixed()
            usage_checks.check_calls(
                self._world,
                calls_differ=math.isnan(totals.calls),
                rows_differ=totals.rows_differ,
            )
            self._spec.gather_order.check()
            if totals.written:
                self._objects.check_written()
        except ShardwiseError:
            self._backward.abandon()
            raise
        finally:
            self._world.calls.clear()

    def _tell_mixed(self) -> None:
        """Raise UsageError where no weight is right for all losses of the step; say it once where
        the user gave the weights. Collective."""
        accumulation = self._accumulation
        told = self._world.island.gather_plain((accumulation.describe(), accumulation.are_given))
        losses = [found for found, _ in told]
        if not all(given for _, given in told):
            raise usage_checks.mixed_losses(losses)
        accumulation.checks_given = False
        self._world.say_once(usage_checks.other_weights(losses))

    # -- reduce and exchange ----------------------------------------------------------------

    def _reduced(self, call: str) -> StepTotals:
        """What all ranks know of this step, its sums made."""
        state, states = self._state, self._objects.states
        self._check_begun(call)
        state.aggregation.check(self._accumulation.backwards)
        states.parameters.check()
        self._objects.take_in_writes()
        self._backward.check_gradients()
        if state.totals is None:
            with self._backward.abandoning():
                self._islands.begin()
            with span("reduce"):
                states.gradients.reduce()
            with span("exchange"):
                totals = self._exchange()
            self._check_consistent(totals)
            state.totals = totals if self._spec.staleness is None else self._delayed(totals)
        return state.totals

    def _delayed(self, totals: StepTotals) -> StepTotals:
        """The totals of the step whose sums are used, those of this one being on their way."""
        self._check_finite(totals)  # while it is known which samples they are of
        with self._backward.abandoning():
            return self._staleness.delayed(totals)

    def _exchange(self) -> StepTotals:
        """Report this rank's part of the step, and return the totals, which all ranks have."""
        try:
            totals = exchange(
                self._accumulation,
                self._state.aggregation,
                self._objects.states.gradients,
                self._objects.buffers,
                self._spec.stage_group,
                self._spec.shard_group.copies,
                self._options.number(),
                self._world.calls,
                unsaved=self._saver.has_failed,
                asked=self._world.preemption.asked,
                written=self._objects.has_written,
                counts=self._spec.tensor_rank == 0,
            )
            line = self._spec.pipeline
            return totals if line is None else over_stages(totals, line.group)
        except UsageError:
            self._backward.abandon()
            raise

    # -- decide -----------------------------------------------------------------------------

    def _scale_of(self, totals: StepTotals) -> float:
        """What makes the summed gradients their mean; 0 where nothing weighs anything."""
        return 1.0 / self._state.weighting.divisor(totals.denominator) if totals.weight else 0.0

    def _factor(self, totals: StepTotals, stats: StepStats, max_norm: float | None) -> float:
        """What the update multiplies the summed gradients by: they are averaged, and clipped by
        their global norm as torch.nn.utils.clip_grad_norm_ does."""
        return self._scale_of(totals) * clip_coefficient(stats.grad_norm, max_norm)

    def _decide(self, totals: StepTotals) -> StepStats:
        """The step's figures, and whether it updates anything."""
        state = self._state
        if totals.weight == 0:
            return StepStats(loss=math.nan, grad_norm=0.0, weight=0.0, skipped=True)
        self._check_finite(totals)
        norm = math.sqrt(totals.squared_norm) / state.weighting.divisor(totals.denominator)
        finite = math.isfinite(norm)
        if words := self._skips.words(finite=finite):
            self._world.print(f"shardwise: {words}")
        return StepStats(
            loss=totals.loss / totals.denominator,
            grad_norm=norm,
            weight=totals.shown,
            skipped=not finite,
        )

    def _check_finite(self, totals: StepTotals) -> None:
        """Raise NonFiniteError, on all ranks, for a gradient that is not finite where the run is to
        stop then. Collective then."""
        state, settings = self._state, self._spec.settings
        goes_on = state.scale.active or settings.nonfinite != "stop"
        if goes_on or not totals.weight or math.isfinite(totals.squared_norm):
            return
        error = diagnosis.nonfinite_error(
            state.steps, state.states, self._accumulation, self._spec.step_group
        )
        self._backward.abandon()
        raise error

    # -- update -----------------------------------------------------------------------------

    def _call_before_step(self) -> None:
        try:
            usage_checks.call_before_step(self._spec.optimizers)
        except BaseException:
            self._backward.abandon()
            raise

    def _update(self, totals: StepTotals, stats: StepStats, max_norm: float | None) -> None:
        """Update bucket by bucket; each is gathered while the next is updated."""
        factor = self._factor(totals, stats, max_norm)
        states = self._objects.states
        gathers: list[Handle] = []
        sums = states.gradients.sums
        # An optimizer of the user's may raise in its step.
        with self._backward.abandoning(), span("update"), torch.no_grad():
            states.parameters.begin_update()
            for inner in states.optimizer.inners:
                states.optimizer.step(inner, sums, totals.used, factor)
                if self._spec.placement.is_sharded("optimizer"):
                    gathers += [
                        states.parameters.publish(i) for i in states.optimizer.buckets_of(inner)
                    ]
            states.optimizer.write_back_options()
            if states.averages is not None:
                states.averages.update()
        with span("publish"):
            for handle in gathers:
                handle.wait()
            # User code may write parameters as soon as the step has returned, so nobody may still
            # be reading them.
            for handle in gathers:
                handle.reusable()
            states.parameters.settle()

    def _step_often(self, closure: Callable[[], Any], max_norm: float | None) -> StepStats:
        """A step of an optimizer that calls the closure by itself."""
        objects = self._objects
        (inner,), gradients = objects.states.optimizer.inners, objects.states.gradients
        seen: list[tuple[StepTotals, StepStats]] = []

        def evaluate() -> float:
            self.zero_grad()
            objects.states.parameters.remember()  # what has changed is the update's doing
            with torch.enable_grad():
                closure()
            totals = self._reduced("engine.step(closure=...)")
            stats = self._decide(totals)
            seen.append((totals, stats))
            inner.offer_again(gradients.sums, totals.used, self._factor(totals, stats, max_norm))
            return stats.loss

        self._accumulation.stepping = True
        self._call_before_step()
        with self._backward.abandoning():
            with span("update"), torch.no_grad():
                inner.step_often(evaluate, gradients.sums)
            objects.states.optimizer.write_back_options()
            if objects.states.averages is not None:
                objects.states.averages.update()
        objects.states.parameters.settle()
        usage_checks.call_after_step(self._spec.optimizers)
        return self._finish(seen[-1][0], seen[0][1])

    # -- clear ------------------------------------------------------------------------------

    def _finish(self, totals: StepTotals, stats: StepStats) -> StepStats:
        """Leave the step behind; returns its figures."""
        if self._state.steps == 0 and (terms := self._accumulation.read_first) is not None:
            start_lines.announce_weight(self._world, self._spec, terms, stats.weight)
        self._clear(totals)
        self._count()
        stats = self._staleness.stepped(stats)
        totals, stats = self._islands.stepped(totals, stats)
        if totals.asked:
            self._agree_to_end(totals.asked)
        # Only now: the step is made on all ranks, and all know of the failure by the exchange.
        if totals.unsaved:
            self._saver.wait()  # raises on all ranks alike
        if self._timing is not None:
            self._timing.stepped()
        if self._recording is not None:
            # Sums are not divided by their weight, which may count the workers.
            self._recording.stepped(stats, 1.0 if totals.divisor else stats.weight)
        self._world.step_log.stepped(self._state.number, self._state.steps, stats)
        return stats

    def _clear(self, totals: StepTotals) -> None:
        """Leave this step behind: what is accumulated from here on is of the next."""
        state, gradients = self._state, self._objects.states.gradients
        if totals.weight:
            overflow = not math.isfinite(totals.squared_norm)
            state.scale.update(overflow=overflow, scale=totals.scale)
            state.weighting.follow_step(totals)
        gradients.clear()
        if totals.several and self._spec.settings.reduce_dtype == "fp32":
            gradients.widen()
        self._accumulation.clear()
        state.weighting.clear(several=totals.several)
        state.totals = None
        state.parameters_changed()

    def _count(self) -> None:
        """Let all who follow the run know that a step was made."""
        state, world = self._state, self._world
        usage_checks.mark_schedulers(self._spec.optimizers)
        state.steps += 1
        world.stepped_last = state.number
        world.steps_made += 1
        world.progress.stepped(state.number, state.steps)
        world.collectives.status_server.step = state.steps
        self._randoms.reseed()
        world.draws.mark_boundary()
        if (recording := recorder.active) is not None:
            recording.stepped(state.number, state.steps)

    def _agree_to_end(self, asked: int) -> None:
        """All ranks know by now that a signal asks them to end."""
        self._world.preemption.agreed = asked
        self._state.asked_to_end = True
        self._saver.mark_boundary()
