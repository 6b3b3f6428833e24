"""Sums gradients over islands at every step, and applies the sums of an earlier step.

    step n    this island's sums are ready     send them, with a SumsReport
              all islands' sums of step n - S  wait, and use them in this update

A gradient is therefore applied to weights that are at most S updates newer than those it was
computed with. This is bounded staleness as in the stale synchronous parallel parameter server (Ho
et al., 2013). Here the delay is always exactly S steps, even if an island is early, so that every
run is bit-identical.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple
from zlib import crc32

import torch

from shardwise.errors import ModelError, ModelMismatch, UsageError
from shardwise.islands.delayed_sums import DelayedSums, Flight
from shardwise.islands.wire import Wire
from shardwise.layout import fingerprints
from shardwise.layout.packed_flags import any_of, pack
from shardwise.messages.printable import in_bytes, many
from shardwise.states.gradients.gradients import Gradients
from shardwise.states.optimizer.interval_gather import IntervalGather
from shardwise.states.optimizer.optimizer_state import OptimizerState
from shardwise.states.parameters.parameters import Parameters
from shardwise.states.step_hooks import HookedEngine, Kept, StepHooks
from shardwise.states.step_totals import StepStats, StepTotals
from shardwise.states.storage.storage_factory import StorageFactory
from shardwise.timeline import span

CHECK_EVERY = 30
"""Number of steps between two comparisons of the islands' weights."""


class SumsReport(NamedTuple):
    """An island's report, which it sends with a step's gradient sums. Each field has 8 bytes.

    The fields are followed by packed flags that mark the parameters with a gradient.
    """

    step: float
    """The number of the step, starting at 1, or 0 if this island sends no more sums."""
    weight: float
    shown: float
    """The weight that is shown to users."""
    loss: float
    backwards: float
    divisor: float
    several: float
    asked: float
    """The signal that asked the island to stop, or 0."""
    unsaved: float
    """1 if a save has failed, otherwise 0."""
    finite: float
    options: float
    """A checksum of the optimizers' options, such as the learning rate."""
    weights: float
    """A checksum of the weights at steps that compare them, otherwise 0."""
    scale: float
    """The loss scale that the gradients include."""
    updates: float
    """The number of updates that the weights had received when the gradients were computed."""

    def row(self, used: list[bool]) -> list[float]:
        """Return the report's fields, followed by the flags in `used`, packed."""
        return [*self, *pack(used)]


def read_reports(
    rows: Sequence[list[float]], parameters: int
) -> tuple[list[SumsReport], list[bool]]:
    """Parse the rows from all islands.

    Returns the reports, and one flag per parameter that is True if any island has a gradient for
    it.
    """
    count = len(SumsReport._fields)
    reports = [SumsReport(*row[:count]) for row in rows]
    return reports, any_of([row[count:] for row in rows], parameters)


class BoundedStaleness(StepHooks):
    """Step hooks of an engine whose islands apply the same updates, from delayed gradients."""

    replaces_sums = True
    bytes_name = "gradients between islands"
    sums: DelayedSums
    """The sums in transit, in the current layout of the states."""

    def __init__(self, *groups: Any) -> None:
        super().__init__(*groups)
        rule = self.settings.staleness_rule
        assert rule is not None, "hooks_for chooses this class only with --behind"
        self._rule = rule
        self._staleness = 0
        self._waited = 0.0
        self._optimizer: OptimizerState

    # -- layouts of the states --------------------------------------------------------------

    def lay_out(
        self,
        parameters: Parameters,
        gradients: Gradients,
        optimizer: OptimizerState,
        factory: StorageFactory,
        kept: Kept | None,
    ) -> None:
        self.sums = DelayedSums(
            parameters,
            gradients,
            Wire(self._rule.wire),
            factory,
            self.shard_group,
            self.peers,
            self.world_group,
            self._rule.behind,
            len(SumsReport._fields) + len(pack([False] * len(parameters.named))),
            scattered=self.scattered,
        )
        # Assign only now: if the sums do not fit into memory, the old layout stays intact.
        self.parameters = parameters
        self._optimizer = optimizer

    def take_apart(self, parameters: Parameters, gathering: IntervalGather) -> Kept | None:
        # Sums in transit have the old layout, so drop them.
        self.sums.forget()
        return None

    def finish(self) -> None:
        self.sums.forget()

    # -- queries ------------------------------------------------------------------------------

    @property
    def state_bytes(self) -> int:
        return self.sums.state_bytes

    def count_in_words(self) -> str:
        return f"{self.peers.size} islands"

    def describe(self) -> str:
        sent = in_bytes(self.sums.nbytes * (self.peers.size - 1))
        return (
            f"{self.peers.size} islands of {many(self.step_group.size, 'worker')}: "
            f"{self._rule.in_words()}: {sent} sent per worker and step"
        )

    # -- around a step ----------------------------------------------------------------------

    def after_exchange(self, engine: HookedEngine, totals: StepTotals) -> StepTotals:
        """Send this step's sums, and replace them with the sums of the step `behind` steps ago.

        Returns that earlier step's totals. In the first `behind` steps of a run there is no earlier
        step, so the totals have weight 0. Collective over all ranks. Raises UsageError or
        ModelMismatch if islands have diverged, and ModelError if the model's forward pass changes
        buffers.
        """
        if engine.buffers.form():
            raise ModelError(
                f"--behind {self._rule.behind} does not work with a model whose forward changes "
                "buffers, such as BatchNorm's running statistics: each island would have "
                "different buffers. Use GroupNorm or LayerNorm, or remove --behind, so that "
                "islands average parameters and buffers every --equal-every steps."
            )
        step = engine.steps + 1
        with torch.no_grad():
            # Send before receiving, because with --behind 0 the sums of this step itself are used.
            self._send(engine, step, totals)
            with span("islands"):
                flight = self.sums.take_due(step - self._rule.behind)
                if flight is None:
                    return replace(
                        totals,
                        weight=0.0,
                        shown=0.0,
                        loss=0.0,
                        squared_norm=0.0,
                        backwards=0,
                        shares=0.0,
                        used=[False] * len(totals.used),
                        several=False,
                        unsaved=False,
                        asked=0,
                    )
                return self._use(engine, flight, totals)

    def _send(self, engine: HookedEngine, step: int, totals: StepTotals) -> None:
        finite = math.isfinite(totals.squared_norm)
        weights = 0.0
        if step % CHECK_EVERY == 1:  # reading all weights takes about as long as an update
            intervals = self._optimizer.intervals
            sums = [fingerprints.sums_of(interval.master.loaded()) for interval in intervals]
            weights = float(crc32(repr(sums).encode()))
        report = SumsReport(
            step,
            totals.weight,
            totals.shown,
            totals.loss,
            totals.backwards,
            totals.divisor,
            totals.several,
            totals.asked,
            totals.unsaved,
            finite,
            totals.options,
            weights,
            engine.scale.value,
            self.sums.updates,
        )
        row = torch.tensor(report.row(totals.used), dtype=torch.float64)
        # Each step scales its gradients differently. Undo the scaling, so that sums of different
        # steps have the same unit.
        self.sums.send(step, row, 1.0 / engine.weighting.divisor(1.0), counts=finite)

    def _use(self, engine: HookedEngine, flight: Flight, totals: StepTotals) -> StepTotals:
        """Replace the gradients with the sums in `flight`, and return the totals of their step."""
        sums, start = self.sums, time.monotonic()
        reports, used = read_reports(sums.receive_reports(flight), len(totals.used))
        _check(reports)
        sums.receive(flight)
        # The time spent waiting for other islands, for the step's statistics.
        self._waited += time.monotonic() - start
        self._staleness = sums.updates - int(reports[0].updates)
        joined = _join(totals, reports, used, engine.replicas)
        # All islands had an empty batch, so there is no update.
        if not joined.weight:
            return joined
        if not math.isfinite(joined.squared_norm):
            # All islands must skip: if only some applied the update, weights would differ from then
            # on.
            sums.fill_with_nan(used)
            return joined
        # Do this before the sums are stored, because they have the unit of the step that computed
        # them.
        engine.weighting.follow_step(joined)
        sums.use(flight, engine.weighting.divisor(1.0))
        # Clipping needs the norm of the total over all islands.
        return replace(joined, squared_norm=engine.squared_norm())

    def after_update(
        self, engine: HookedEngine, totals: StepTotals, stats: StepStats
    ) -> tuple[StepTotals, StepStats]:
        # Not in `after_exchange`: until the update is applied, a step may be abandoned and
        # repeated, and then it needs the same sums.
        self.sums.commit(engine.steps)
        self.sums.updates += not stats.skipped
        stats = replace(stats, staleness=self._staleness, waited=self._waited)
        self._staleness, self._waited = 0, 0.0
        return totals, stats


def _join(
    totals: StepTotals, reports: Sequence[SumsReport], used: list[bool], replicas: int
) -> StepTotals:
    """Return a step's totals over all islands.

    If any island's gradients are not finite, the squared norm is infinite.
    """
    backwards = sum(report.backwards for report in reports)
    return replace(
        totals,
        weight=sum(report.weight for report in reports),
        shown=sum(report.shown for report in reports),
        loss=sum(report.loss for report in reports),
        squared_norm=0.0 if all(report.finite for report in reports) else math.inf,
        backwards=int(backwards),
        # Islands do not report shares. This estimate determines the unit of gradients. It only has
        # to be identical on all islands.
        shares=backwards / (1 if reports[0].divisor else replicas),
        used=used,
        several=any(report.several for report in reports),
        unsaved=any(report.unsaved for report in reports),
        asked=int(max(report.asked for report in reports)),
        divisor=reports[0].divisor,
        scale=reports[0].scale,
    )


_MUST_AGREE = {
    "options": "The optimizers' options, such as the learning rate, differ between island {k} and "
    "island 0 at step {step:g}, so islands would train different models. Set the same options on "
    "all islands. Give schedulers only values that all know, such as engine.step().loss.",
    "divisor": "Islands disagree on `reduction` at step {step:g}: pass the same value "
    '("mean", "sum" or "ddp") on every worker.',
    "weights": "The weights before step {step:g} differ between island {k} and island 0. All "
    "islands make the same updates, so something else has changed them. Write the same values on "
    "every worker, or rank 0's values on all: with engine.full_parameters(write=True).",
}
"""Fields that must be identical on all islands, and the error message if they are not."""


def _check(reports: Sequence[SumsReport]) -> None:
    """Raise UsageError or ModelMismatch if islands have diverged.

    All peers raise the same error.
    """
    first = reports[0]
    for island, report in enumerate(reports):
        if not report.step:
            step = max(other.step for other in reports)
            raise UsageError(
                f"Island {island} has closed its engine, loaded a checkpoint or changed its "
                f"parameters before step {step:g}, but other islands make that step. All islands "
                "must do this after the same number of steps."
            )
    for island, report in enumerate(reports):
        if report.step != first.step:
            raise UsageError(
                f"Island {island} has made {report.step - 1:g} steps, but island 0 "
                f"{first.step - 1:g}. Islands add the gradients of the same step, so all must make "
                "the same number of steps, and continue from the same checkpoint."
            )
        for name, message in _MUST_AGREE.items():
            if getattr(report, name) != getattr(first, name):
                raise ModelMismatch(message.format(k=island, step=first.step))
