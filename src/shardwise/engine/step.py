"""Runs a step: reduces gradients, exchanges totals, clips, updates, publishes and clears.

reduce      wait for pending reductions
exchange    one small collective: weights, losses, norm, which parameters have a gradient
(delay)     with `--behind`: replace the sums with those of an earlier step
(between)   give the user full gradients to read or change
decide      skip the step, stop the run, or compute the factor that averages and clips
update      update each bucket (states/optimizer); all-gather it if only its state is sharded
clear       free the gradients, and seed the generators for the next step
(average)   with islands: average their parameters if an average is due
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from shardwise.checkpoint.checkpoints import Checkpoints
from shardwise.comm import Handle
from shardwise.engine import closures, consistency, diagnosis, start_lines, usage_checks
from shardwise.engine.backward import BackwardRunner
from shardwise.engine.early_update import EarlyUpdate
from shardwise.engine.engine_state import EngineState
from shardwise.engine.exchange import exchange, over_stages
from shardwise.engine.random_state import RandomState
from shardwise.engine.recording import Recording
from shardwise.errors import ShardwiseError, UsageError
from shardwise.parallel.pipeline import LayerTimes
from shardwise.states.gradients.gradient_norm import clip_coefficient
from shardwise.states.step_totals import StepStats, StepTotals
from shardwise.states.whole_gradients import WholeGradients
from shardwise.timeline import recorder, span
from shardwise.world.randomness import seed_from


class StepRunner:
    """Runs the steps of an engine.

    Args:
        state: State shared by the parts of the engine.
        backward: Runs the backward passes of the same engine.
        randoms: Seeds the random generators after each step.
        checkpoints: The engine's checkpoints. Failed background saves are reported in the
            exchange.
        timing: Measures the time per layer, or None.
        recording: Records each step for `shardwise verify`, or None.
    """

    _updates_early = True
    """False if a subclass decides itself whether a step is applied."""

    def __init__(
        self,
        state: EngineState,
        backward: BackwardRunner,
        randoms: RandomState,
        checkpoints: Checkpoints,
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
        self._saver = checkpoints.saver
        self._timing = timing
        self._recording = recording
        self._hooks = state.spec.hooks
        self._options = consistency.OptionChecksum(state.spec.optimizers)
        self._skips = diagnosis.Skips(scaled=state.scale.active)
        self._ended: float | None = None  # time of the previous step whose tokens are known

    # -- called by the engine ---------------------------------------------------------------

    def step(self, max_norm: float | None, closure: Callable[[], Any] | None) -> StepStats:
        """See Engine.step."""
        states = self._objects.states
        if closure is None:
            self._check_begun("engine.step()")
        # From here on, attribute a failure to the step; don't report it as backward passes without
        # a step.
        self._accumulation.stepping = self._accumulation.backwards > 0
        if max_norm is not None and not max_norm > 0:
            raise UsageError(f"max_norm must be a number above 0, not {max_norm}.")
        if closure is not None:
            scaled = self._state.scale.active
            closures.check(self._spec, states, self._accumulation, scaled=scaled)
            if closures.may_call_repeatedly(states):
                return self._step_often(closure, max_norm)
            with torch.enable_grad():
                closure()
        # All ranks have the same optimizers, so a missing closure raises on all of them before any
        # collective starts.
        closures.check_given(self._objects.states, given=closure is not None)
        # After the exchange all ranks have the same totals, so they make the same decision to skip,
        # raise or update. They must, because the all-gathers of an update need every rank.
        early = self._early_update(max_norm)
        with self._applied_once(early):
            totals = self._reduced("engine.step()", early)
            stats = self._decide(totals)
        if not stats.skipped:
            self._call_before_step()
            is_done = early is not None and early.has_updated
            self._update(totals, None if is_done else self._factor(totals, stats, max_norm))
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
            spec.gradient_group,
            totals.used,
            # With a total weight of 0 the step is skipped, so any factor will do.
            self._scale_of(totals) or 1.0,
            scattered=spec.placement.is_sharded("optimizer"),
        )
        whole.show()
        with self._backward.abandoning():
            yield
            used = whole.take()
        # After the block, any use of `param.grad` must raise again until the step.
        states.gradients.guard()
        squared = self._state.squared_norm()
        self._state.totals = replace(totals, used=used, squared_norm=squared)

    def zero_grad(self) -> None:
        """See Engine.zero_grad."""
        if self._accumulation.backwards:
            self._backward.abandon()
            if self._spec.settings.exact is not None:
                # Each micro-shard has its own seed, and the step restarts at the first micro-shard.
                self._randoms.reseed()

    def close(self) -> None:
        """Remove hooks from the models. Overridden by the guard."""

    # -- checks -----------------------------------------------------------------------------

    def _check_begun(self, call: str) -> None:
        """Raise UsageError if no backward pass precedes `call`, or if inside `world.alike()`."""
        self._world.draws.check_outside(call)
        if not self._accumulation.backwards:
            raise UsageError(
                f"{call} was called without engine.backward(loss) since the last step: call "
                "backward first."
            )

    def _refuse_parts(self, call: str) -> None:
        """Raise UsageError if the model is split, because `call` needs full gradients."""
        spec = self._spec
        axes = {"tensor": spec.tensor, "pipeline": spec.pipeline, "expert": spec.experts}
        for name, splits in axes.items():
            if splits is not None:
                size = getattr(self._world.settings, name)
                raise UsageError(
                    f"{call} with --{name} {size}: no worker has the whole gradient. "
                    f"engine.reduce() returns its norm; for more, start without --{name}."
                )

    def _check_consistent(self, totals: StepTotals) -> None:
        """Discard the step and raise on all ranks if their options, losses or writes differ."""
        try:
            # These totals come from the exchange and are the same on all ranks. So all ranks raise,
            # and none waits for the others in the next collective.
            if not totals.alike:
                raise self._options.difference(self._spec.step_group)
            if math.isnan(totals.divisor):
                raise UsageError(
                    'Ranks disagree on `reduction`: pass the same value ("mean", "sum" or "ddp") '
                    "on every rank. If you pass none, the losses of this step are sums on some "
                    "ranks and means on others."
                )
            if totals.is_mixed:
                self._report_mixed()
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

    def _report_mixed(self) -> None:
        """Raise UsageError because no weight is right for all losses of the step. Collective.

        If the user passed all weights, print one warning instead, because the script may intend
        these weights.
        """
        accumulation = self._accumulation
        gathered = self._world.step_group.gather_plain(
            (accumulation.describe(), accumulation.has_given_weights)
        )
        losses = [descriptions for descriptions, _ in gathered]
        if not all(has_given_weights for _, has_given_weights in gathered):
            raise usage_checks.mixed_losses(losses)
        accumulation.checks_weights = False
        self._world.say_once(usage_checks.other_weights(losses))

    # -- reduce and exchange ----------------------------------------------------------------

    def _early_update(self, max_norm: float | None) -> EarlyUpdate | None:
        """Return the update to launch before the totals are read, or None if they are needed."""
        spec = self._spec
        # On a CPU there is nothing to overlap. The norm is that of all stages, even if each stage
        # has a single rank.
        if not self._updates_early or spec.device.type == "cpu" or spec.pipeline is not None:
            return None
        # Hooks of users may change the gradients, and expect that the step is not skipped.
        if self._hooks is not None or usage_checks.has_pre_hooks(spec.optimizers):
            return None
        state, abandoning = self._state, self._backward.abandoning
        return EarlyUpdate(state.states, state.aggregation, state.weighting, max_norm, abandoning)

    @contextmanager
    def _applied_once(self, early: EarlyUpdate | None) -> Iterator[None]:
        """Discard the step's gradients if the block raises after the update was launched.

        For example, Ctrl-C in a notebook. Another `engine.step()` would apply them again.
        """
        try:
            yield
        except BaseException:
            if early is not None and early.has_updated:
                self._backward.abandon()
                self._objects.states.parameters.settle()
            raise

    def _reduced(self, call: str, early: EarlyUpdate | None = None) -> StepTotals:
        """Reduce this step's gradients unless this was already done. Return the global totals."""
        state, states = self._state, self._objects.states
        self._check_begun(call)
        state.aggregation.check(self._accumulation.backwards)
        states.parameters.check()
        self._objects.take_in_writes()
        self._backward.check_gradients()
        # If the totals exist, engine.reduce() or full_gradients() has already reduced this step.
        if state.totals is None:
            if self._hooks is not None:
                with self._backward.abandoning():
                    self._hooks.before_step(state)
            with span("reduce"):
                states.gradients.reduce()
            with span("exchange"):
                totals = self._exchange(early)
            self._check_consistent(totals)
            if self._hooks is not None:
                if self._hooks.replaces_sums:
                    # Check now: when these sums are applied, their samples are no longer known.
                    self._check_finite(totals)
                with self._backward.abandoning():
                    totals = self._hooks.after_exchange(state, totals)
            state.totals = totals
        return state.totals

    def _exchange(self, early: EarlyUpdate | None) -> StepTotals:
        """Report this rank's statistics of the step, and return the totals across all ranks."""
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
                asked=self._world.preemption.asked_of_all,
                written=self._objects.has_written,
                # Tensor-parallel ranks share a batch, which must be counted once.
                counts=self._spec.tensor_rank == 0,
                experts=() if self._spec.routing is None else self._spec.routing.step_counts,
                early=early,
            )
            line = self._spec.pipeline
            return totals if line is None else over_stages(totals, line.group)
        except UsageError:
            self._backward.abandon()
            raise

    # -- decide -----------------------------------------------------------------------------

    def _scale_of(self, totals: StepTotals) -> float:
        """Return the factor that turns gradient sums into means, or 0 if the total weight is 0."""
        return 1.0 / self._state.weighting.divisor(totals.denominator) if totals.weight else 0.0

    def _factor(self, totals: StepTotals, stats: StepStats, max_norm: float | None) -> float:
        """Return the factor that averages the summed gradients and clips their global norm."""
        return self._scale_of(totals) * clip_coefficient(stats.grad_norm, max_norm)

    def _decide(self, totals: StepTotals) -> StepStats:
        """Return the step's statistics, which say whether to skip it."""
        state = self._state
        if totals.weight == 0:
            return StepStats(loss=math.nan, grad_norm=0.0, weight=0.0, skipped=True)
        self._check_finite(totals)
        # The divisor includes the loss scale, so this is the norm of the unscaled mean gradient.
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
        """Raise NonFiniteError on all ranks if a gradient is not finite.

        Does nothing with a loss scale or `--nonfinite skip`, because the step is then skipped.
        Collective if it raises.
        """
        state, settings = self._state, self._spec.settings
        skips = state.scale.active or settings.nonfinite != "stop"
        if skips or not totals.weight or math.isfinite(totals.squared_norm):
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

    def _update(self, totals: StepTotals, factor: float | None) -> None:
        """Update the buckets in turn. Each is all-gathered while the next one is updated.

        `factor` multiplies the gradients. If it is None, the optimizers were called already.
        """
        states = self._objects.states
        publishes = self._spec.placement.is_sharded("optimizer")
        gathers: list[Handle] = []
        # Discard the gradients if the user's optimizer raises in its step.
        with self._backward.abandoning(), span("update"), torch.no_grad():
            states.parameters.begin_update()
            if states.optimizer.rounds:
                states.optimizer.seed = seed_from(
                    self._world.seed, self._state.number, "rounding", self._state.steps
                )
            for inner in states.optimizer.inners:
                if factor is not None:
                    inner.step(totals.used, factor)
                if publishes:
                    gathers += [states.parameters.publish(number) for number in inner.buckets]
            states.optimizer.write_back_options()
            if states.averages is not None:
                states.averages.update()
        with span("publish"):
            for handle in gathers:
                handle.wait()
            # User code may write parameters as soon as the step returns, so wait until no other
            # rank is still reading them.
            for handle in gathers:
                handle.reusable()
            states.parameters.settle()

    def _step_often(self, closure: Callable[[], Any], max_norm: float | None) -> StepStats:
        """Run a step of an optimizer that may call the closure several times, such as L-BFGS."""
        objects = self._objects
        # `closures.check` has ensured that there is exactly one inner optimizer.
        (inner,) = objects.states.optimizer.inners
        seen: list[tuple[StepTotals, StepStats]] = []

        def evaluate() -> float:
            self.zero_grad()
            # The optimizer has updated parameters between evaluations. Don't treat these changes as
            # user writes.
            objects.states.parameters.remember()
            with torch.enable_grad():
                closure()
            # The optimizer calls the closure the same number of times on all ranks, because they
            # all get the same loss and gradient. So the collectives inside match.
            totals = self._reduced("engine.step(closure=...)")
            stats = self._decide(totals)
            seen.append((totals, stats))
            inner.offer_again(totals.used, self._factor(totals, stats, max_norm))
            return stats.loss

        self._accumulation.stepping = True
        self._call_before_step()
        with self._backward.abandoning():
            with span("update"), torch.no_grad():
                inner.step_often(evaluate)
            objects.states.optimizer.write_back_options()
            if objects.states.averages is not None:
                objects.states.averages.update()
        objects.states.parameters.settle()
        usage_checks.call_after_step(self._spec.optimizers)
        # Clear with the latest totals, but report the first evaluation, which has the loss before
        # the update.
        return self._finish(seen[-1][0], seen[0][1])

    # -- clear ------------------------------------------------------------------------------

    def _finish(self, totals: StepTotals, stats: StepStats) -> StepStats:
        """Complete the step: clear gradients, advance counters, record results.

        Returns the final statistics.
        """
        # Announce the weight before `_clear`, which drops the terms.
        if self._state.steps == 0 and (terms := self._accumulation.first_terms) is not None:
            start_lines.announce_weight(self._world, self._spec, terms, stats.weight)
        tokens, positions = self._accumulation.tokens
        if tokens:
            now = time.perf_counter()
            rate = tokens / (now - self._ended) if self._ended is not None else 0.0
            padding = 1 - tokens / positions
            stats = replace(stats, tokens=tokens, padding=padding, tokens_per_second=rate)
            self._ended = now
        if self._spec.routing is not None:
            counts = self._spec.routing.stepped(totals.experts, skipped=stats.skipped)
            stats = replace(stats, experts=counts)
        self._clear(totals)
        self._count()
        if self._hooks is not None:
            totals, stats = self._hooks.after_update(self._state, totals, stats)
            self._state.parameters_changed()
        if totals.asked:
            # All ranks know from the exchange that a signal has asked the run to stop.
            self._world.preemption.agreed = totals.asked
            self._state.asked_to_end = True
            self._saver.mark_boundary()
        # Raise only after the step is complete on all ranks. They all know of the failed save from
        # the exchange, so all of them raise here.
        if totals.unsaved:
            self._saver.wait()
        self._saver.report_untracked()
        if self._timing is not None:
            self._timing.stepped()
        if self._recording is not None:
            # Don't divide losses that are sums: their weight may count workers instead of items.
            self._recording.stepped(stats, 1.0 if totals.divisor else stats.weight)
        self._world.step_log.stepped(self._state.number, self._state.steps, stats)
        return stats

    def _clear(self, totals: StepTotals) -> None:
        """Clear the step's gradients, weights and losses, and adapt the loss scale."""
        state, gradients = self._state, self._objects.states.gradients
        # A step with weight 0 contains no information about overflow or about the weight of the
        # next step.
        if totals.weight:
            overflow = not math.isfinite(totals.squared_norm)
            state.scale.update(overflow=overflow, scale=totals.scale)
            state.weighting.follow_step(totals)
        gradients.clear()
        # Summing several backward passes in 16 bits loses precision. `several` is the same on all
        # ranks, so they all switch the dtype of their collectives at the same step.
        if totals.several and self._spec.settings.reduce_dtype == "fp32":
            gradients.widen()
        self._accumulation.clear()
        state.weighting.clear(several=totals.several)
        state.totals = None
        state.parameters_changed()

    def _count(self) -> None:
        """Advance the step counters, and report the step to the progress, timeline and watchdog."""
        state, world = self._state, self._world
        usage_checks.mark_schedulers(self._spec.optimizers)
        state.steps += 1
        world.last_stepped_engine = state.number
        world.steps_made += 1
        world.current_batch.step()
        world.progress.stepped(state.number, state.steps)
        world.collectives.status_server.step = state.steps
        self._randoms.reseed()
        # Call this after the reseed, because from here on this rank's own draws no longer advance
        # the common random stream.
        world.draws.mark_boundary()
        if (recording := recorder.active) is not None:
            recording.stepped(state.number, state.steps)
