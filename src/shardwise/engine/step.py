"""The part of an engine that makes a step of the gradients that backward has left.

reduce      the sums that are still on their way; one small exchange: weights, norm, what was
            used
(between)   whole gradients for the user: read, changed
step        clip; update each bucket (states/optimizer_state) and publish it; clear
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch

from shardwise.collectives import Collectives, Handle
from shardwise.engine import closures, diagnosis, usage_checks
from shardwise.engine.accumulation import StepStats, Totals
from shardwise.engine.backward import Backwards
from shardwise.engine.exchange import exchange, over_stages, squared_norm
from shardwise.engine.optimizer_options import Options
from shardwise.errors import CollectiveError, ShardwiseError, UsageError
from shardwise.model.precision import LossScale
from shardwise.placement import Placement
from shardwise.states.whole_gradients import WholeGradients
from shardwise.timeline import recorder, span


class Stepping(Backwards):
    """What makes steps; an engine is one."""

    placement: Placement
    _group: Collectives
    _options: Options
    _scale: LossScale
    _skips: diagnosis.Skips

    @abstractmethod
    def _tell_line(self) -> None:
        """Parameters have changed: other stages may have some of them."""

    def step(
        self, max_norm: float | None = None, *, closure: Callable[[], Any] | None = None
    ) -> StepStats:
        """Average the gradients over everything since the last step, clip, update and clear.

        `max_norm` clips by the global 2-norm, as torch.nn.utils.clip_grad_norm_ does. With a
        `closure` there is no backward before: it computes the loss and calls `engine.backward`, and
        is called as often as the optimizer wants (L-BFGS: with replicated states, `--zero 0`; the
        figures are those of its first call). Collective.

        Raises UsageError without a backward, NonFiniteError for a NaN or infinite gradient where
        there is no loss scale (`--nonfinite skip` skips the step instead); when the step is made,
        CheckpointNotWritten if a save in the background has failed since the last one.
        """
        if closure is None:
            self._check_begun("engine.step()")
        self._window.stepping = self._window.backwards > 0
        if max_norm is not None and not max_norm > 0:
            raise UsageError(f"max_norm takes a number above 0, not {max_norm}.")
        if closure is not None:
            scaled = self._scale.active
            closures.check(self._recipe, self._states, self._window, scaled=scaled)
            if closures.asks_often(self._states):
                return self._step_often(closure, max_norm)
            with torch.enable_grad():
                closure()
        closures.check_given(self._states, given=closure is not None)
        totals = self._reduced("engine.step()")
        stats = self._decide(totals)
        if not stats.skipped:
            self._call_before_step()
            self._update(totals, stats, max_norm)
            usage_checks.call_after_step(self._recipe.optimizers)
        self._finish_step(totals, stats)
        return stats

    def _step_often(self, closure: Callable[[], Any], max_norm: float | None) -> StepStats:
        """A step of an optimizer that calls the closure by itself."""
        (inner,), parts = self._states.optimizer.inners, self._states.gradients
        seen: list[tuple[Totals, StepStats]] = []

        def evaluate() -> float:
            self.zero_grad()
            self._states.parameters.remember()  # what has changed is the update's doing
            with torch.enable_grad():
                closure()
            totals = self._reduced("engine.step(closure=...)")
            stats = self._decide(totals)
            seen.append((totals, stats))
            inner.offer_again(parts.sums, totals.used, self._factor(totals, stats, max_norm))
            return stats.loss

        self._window.stepping = True
        self._call_before_step()
        try:
            with span("update"), torch.no_grad():
                inner.step_often(evaluate, parts.sums)
            self._states.optimizer.tell_faces()
            if self._states.averages is not None:
                self._states.averages.update()
        except BaseException:
            with suppress(CollectiveError):  # the first error is the one to show
                self._abandon()
            raise
        self._states.parameters.settle()
        usage_checks.call_after_step(self._recipe.optimizers)
        self._finish_step(seen[-1][0], seen[0][1])
        return seen[0][1]

    def _finish_step(self, totals: Totals, stats: StepStats) -> None:
        self._end_step(totals)
        if totals.unsaved:
            self._checkpoints.wait()  # raises on all ranks alike, the step made
        if self._timing is not None:
            self._timing.stepped()
        self.world.step_log.stepped(self._number, self.steps, stats)

    # -- between backward and step ----------------------------------------------------------

    def reduce(self) -> float:
        """Sum up the gradients of this step over all workers, and return the norm of their mean.

        `engine.step()` goes on from there; no backward may come in between. Collective. Raises as
        `step` does.
        """
        totals = self._reduced("engine.reduce()")
        return math.sqrt(totals.squared_norm) * self._scale_of(totals)

    @contextmanager
    def full_gradients(self) -> Iterator[None]:
        """Between backward and step: inside the block `param.grad` of every trained parameter is
        the whole gradient of the mean over all items of all workers, unscaled and unclipped, or
        None where no worker had one.

        What is written into it, or put in its place (None takes the parameter out of the step), is
        what `engine.step()` updates with; rank 0's is everyone's. It is the parameter's dtype, and
        whole on every worker. Collective: every rank enters and leaves.

        Raises UsageError without a backward, and where no worker has the whole model (`--tensor`,
        `--pipeline`).
        """
        self._refuse_parts("engine.full_gradients()")
        totals = self._reduced("engine.full_gradients()")
        shown = WholeGradients(
            self._states.parameters,
            self._states.gradients,
            self._recipe.sharding,
            self._recipe.run,
            totals.used,
            self._scale_of(totals) or 1.0,
            scattered=self.placement.is_sharded("optimizer"),
        )
        shown.show()
        try:
            yield
            used = shown.take()
        except BaseException:
            with suppress(CollectiveError):  # the first error is the one to show
                self._abandon()
            raise
        self._states.gradients.guard()
        copies = self._recipe.sharding.copies
        squared = squared_norm(self._parts, self._states.gradients, self._group, copies)
        self._totals = replace(totals, used=used, squared_norm=squared)

    def zero_grad(self) -> None:
        """Forget the gradients of this step: the next `backward` begins it anew. Called by all
        ranks; harmless where there are none."""
        if self._window.backwards:
            self._abandon()
            if self._recipe.shards is not None:
                self._reseed()  # what is drawn depends on the micro-shard, and the first is next

    def _refuse_parts(self, call: str) -> None:
        """Raise UsageError for a `call` that takes whole models where ranks have parts."""
        for name, apart in (("tensor", self._recipe.split), ("pipeline", self._recipe.line)):
            if apart is not None:
                size = getattr(self.world.settings, name)
                raise UsageError(
                    f"{call} with --{name} {size}: no worker has the whole of a gradient. "
                    f"engine.reduce() returns the norm of all; for more, start without --{name}."
                )

    # -- the step, piece by piece -----------------------------------------------------------

    def _reduced(self, call: str) -> Totals:
        """What all ranks know of this step, its sums made."""
        self._check_begun(call)
        self._parts.check(self._window.backwards)
        self._states.parameters.check()
        self._held.take_in_writes()
        self._check_gradients()
        if self._totals is None:
            with span("reduce"):
                self._states.gradients.reduce()
            with span("exchange"):
                totals = self._exchange()
            self._check_alike(totals)
            self._totals = totals
        return self._totals

    def _check_begun(self, call: str) -> None:
        """Raise UsageError where there is nothing that `call` could sum up."""
        if not self._window.backwards:
            raise UsageError(
                f"{call} without engine.backward(loss) since the last step: call backward first."
            )

    def _check_alike(self, totals: Totals) -> None:
        """Raise, on all ranks, where they go on from what is not alike; the step is forgotten."""
        try:
            if not totals.alike:
                raise self._options.difference(self._group)
            if math.isnan(totals.divisor):
                raise UsageError(
                    'Losses of this step are sums on some ranks (reduction="sum" or "ddp") and '
                    "means, or the other kind of sums, on others: write them in one way."
                )
            if totals.written:
                self._held.check_written()
        except ShardwiseError:
            self._abandon()
            raise

    def _exchange(self) -> Totals:
        """What all ranks know of the step, alike."""
        try:
            totals = exchange(
                self._window,
                self._parts,
                self._states.gradients,
                self._held.buffers,
                self._recipe.stage,
                self._recipe.sharding.copies,
                self._options.number(),
                unsaved=self._checkpoints.has_failed,
                asked=self.world.preemption.asked,
                written=self._held.has_written,
                counts=self._recipe.part == 0,
            )
            line = self._recipe.line
            return totals if line is None else over_stages(totals, line.group)
        except UsageError:
            self._abandon()
            raise

    def _scale_of(self, totals: Totals) -> float:
        """What makes the summed gradients their mean; 0 where nothing weighs anything."""
        return 1.0 / self._seeds.divisor(totals.denominator) if totals.weight else 0.0

    def _decide(self, totals: Totals) -> StepStats:
        """The step's figures, and whether it updates anything."""
        if totals.weight == 0:
            return StepStats(loss=math.nan, grad_norm=0.0, weight=0.0, skipped=True)
        norm = math.sqrt(totals.squared_norm) / self._seeds.divisor(totals.denominator)
        finite = math.isfinite(norm)
        if not finite and not self._scale.active and self.settings.nonfinite == "stop":
            error = diagnosis.nonfinite_error(self.steps, self._states, self._window, self._group)
            self._abandon()
            raise error
        if words := self._skips.words(finite=finite):
            self.world.print(f"shardwise: {words}")
        return StepStats(
            loss=totals.loss / totals.denominator,
            grad_norm=norm,
            weight=totals.weight,
            skipped=not finite,
        )

    def _call_before_step(self) -> None:
        try:
            usage_checks.call_before_step(self._recipe.optimizers)
        except BaseException:
            self._abandon()
            raise

    def _factor(self, totals: Totals, stats: StepStats, max_norm: float | None) -> float:
        """What the summed gradients are multiplied by for the update."""
        factor = self._scale_of(totals)
        if max_norm is not None:
            factor *= min(1.0, max_norm / (stats.grad_norm + 1e-6))
        return factor

    def _update(self, totals: Totals, stats: StepStats, max_norm: float | None) -> None:
        """Update bucket by bucket; each is on its way to the others while the next is updated."""
        factor = self._factor(totals, stats, max_norm)
        states = self._states
        sent: list[Handle] = []
        sums = states.gradients.sums
        with span("update"), torch.no_grad():
            for inner in states.optimizer.inners:
                states.optimizer.step(inner, sums, totals.used, factor)
                if self.placement.is_sharded("optimizer"):
                    sent += [
                        states.parameters.publish(i) for i in states.optimizer.buckets_of(inner)
                    ]
            states.optimizer.tell_faces()
            if states.averages is not None:
                states.averages.update()
        with span("publish"):
            for handle in sent:
                handle.wait()
            for handle in sent:
                handle.reusable()  # user code may write parameters as soon as the step has returned
            states.parameters.settle()

    def _end_step(self, totals: Totals) -> None:
        if totals.weight:
            self._scale.update(overflow=not math.isfinite(totals.squared_norm))
            factors = totals.backwards if totals.divisor else totals.weight
            self._seeds.follow(factors, totals.backwards)
        self._states.gradients.clear()
        if totals.several and self.settings.reduce_dtype == "fp32":
            self._states.gradients.widen()
        self._window.clear()
        self._totals = None
        self._tell_line()
        usage_checks.tell_schedulers(self._recipe.optimizers)
        self.steps += 1
        self.world.stepped_last = self._number
        self.world.steps_made += 1
        self.world.telling.stepped(self._number, self.steps)
        self._group.lookout.step = self.steps
        self._reseed()
        if (recording := recorder.active) is not None:
            recording.stepped(self._number, self.steps)
        if totals.asked:
            self._agree_to_end(totals.asked)
