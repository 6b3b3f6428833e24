"""Sums gradients over islands at every step, and updates with the sums of some steps before.

    step n    this island's sums are ready    send them, with a SumsReport
              those of step n - S, of all     wait, and use them in this update

The gradients of a step are so computed with weights that at most S updates have changed since:
bounded staleness, as in the stale synchronous parallel parameter server (Ho et al., 2013). Here the
delay is always S steps, whichever island is early, so that every run has the same bits.
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
"""Steps from one comparison of the islands' weights to the next."""


class SumsReport(NamedTuple):
    """What an island sends to the others with the sums of a step, 8 bytes per field; flags of the
    parameters that had a gradient follow, packed."""

    step: float
    """From 1 on; 0 says that this island sends no sums any more."""
    weight: float
    shown: float
    """What users see of the weight."""
    loss: float
    backwards: float
    divisor: float
    several: float
    asked: float
    """The signal by which it was asked to end, or 0."""
    unsaved: float
    """Whether a save has failed."""
    finite: float
    options: float
    """A checksum of the optimizers' options."""
    weights: float
    """A checksum of the weights, at steps that compare them; else 0."""
    scale: float
    """The loss scale of the gradients."""
    updates: float
    """How many updates had changed the weights with which they were computed."""

    def row(self, used: list[bool]) -> list[float]:
        """The report as numbers, with a flag by parameter that had a gradient."""
        return [*self, *pack(used)]


def read_reports(
    rows: Sequence[list[float]], parameters: int
) -> tuple[list[SumsReport], list[bool]]:
    """The reports of all islands, and which of so many parameters had a gradient on any."""
    count = len(SumsReport._fields)
    reports = [SumsReport(*row[:count]) for row in rows]
    return reports, any_of([row[count:] for row in rows], parameters)


class BoundedStaleness(StepHooks):
    """Hooks of an engine whose islands make the same updates, from delayed gradients."""

    replaces_sums = True
    bytes_name = "gradients between islands"
    sums: DelayedSums
    """The sums in transit, in the present layout."""

    def __init__(self, *groups: Any) -> None:
        super().__init__(*groups)
        rule = self.settings.staleness_rule
        assert rule is not None, "islands make gradients equal"
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
        # Only now, since sums may not fit into memory: then the layout before stays whole.
        self.parameters = parameters
        self._optimizer = optimizer

    def take_apart(self, parameters: Parameters, gathering: IntervalGather) -> Kept | None:
        # Sums in transit have the old layout, so nobody uses them.
        self.sums.forget()
        return None

    def finish(self) -> None:
        self.sums.forget()

    # -- what there is ------------------------------------------------------------------------

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
        """Send the sums of this step, and replace them by those of `behind` steps before.

        Returns the totals of those; in the first steps of a run there are none, and the totals
        weigh nothing. Collective over all ranks. Raises if islands have diverged, and ModelError
        for a model whose forward changes buffers.
        """
        if engine.buffers.form():
            raise ModelError(
                f"--behind {self._rule.behind} with a model whose forward changes its "
                "buffers, as BatchNorm does its running statistics: those would be other ones on "
                "each island. Take GroupNorm or LayerNorm, or leave --behind out, so that islands "
                "make parameters and buffers equal every --equal-every steps."
            )
        step = engine.steps + 1
        with torch.no_grad():
            self._send(engine, step, totals)
            with span("islands"):
                flight = self.sums.due(step - self._rule.behind)
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
        if step % CHECK_EVERY == 1:  # reading all weights takes as long as an update
            intervals = self._optimizer.intervals
            several = [fingerprints.sums_of(interval.master.loaded()) for interval in intervals]
            weights = float(crc32(repr(several).encode()))
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
        # Each step chooses the seeds of its backwards anew. What is sent is divided by them, so
        # that sums of different steps have one unit.
        self.sums.send(step, row, 1.0 / engine.weighting.divisor(1.0), counts=finite)

    def _use(self, engine: HookedEngine, flight: Flight, totals: StepTotals) -> StepTotals:
        """Replace the gradients by the sums of `flight`; returns their totals."""
        sums, begun = self.sums, time.monotonic()
        reports, used = read_reports(sums.reported(flight), len(totals.used))
        _check(reports)
        sums.land(flight)
        self._waited += time.monotonic() - begun
        self._staleness = sums.updates - int(reports[0].updates)
        theirs = _joined(totals, reports, used, engine.replicas)
        if not theirs.weight:
            return theirs
        if not math.isfinite(theirs.squared_norm):
            # All islands skip: one that updated alone would have other weights from then on.
            sums.spoil(used)
            return theirs
        # Before the sums are stored: they are stored in the unit of their own step.
        engine.weighting.follow_step(theirs)
        sums.use(flight, engine.weighting.divisor(1.0))
        return replace(theirs, squared_norm=engine.squared_norm())

    def after_update(
        self, engine: HookedEngine, totals: StepTotals, stats: StepStats
    ) -> tuple[StepTotals, StepStats]:
        # Not in `after_exchange`: until the update is made, a step may be abandoned and begun
        # again, and then needs the same sums.
        self.sums.stepped(engine.steps)
        self.sums.updates += not stats.skipped
        stats = replace(stats, staleness=self._staleness, waited=self._waited)
        self._staleness, self._waited = 0, 0.0
        return totals, stats


def _joined(
    totals: StepTotals, reports: Sequence[SumsReport], used: list[bool], replicas: int
) -> StepTotals:
    """What all islands know of the step that was reported. If gradients of any are not finite, the
    squared norm is infinite."""
    backwards = sum(report.backwards for report in reports)
    return replace(
        totals,
        weight=sum(report.weight for report in reports),
        shown=sum(report.shown for report in reports),
        loss=sum(report.loss for report in reports),
        squared_norm=0.0 if all(report.finite for report in reports) else math.inf,
        backwards=int(backwards),
        # Islands report no shares: the unit that follows from them is an estimate, which only has
        # to be the same on all.
        shares=backwards / (1 if reports[0].divisor else replicas),
        used=used,
        several=any(report.several for report in reports),
        unsaved=any(report.unsaved for report in reports),
        asked=int(max(report.asked for report in reports)),
        divisor=reports[0].divisor,
        scale=reports[0].scale,
    )


_ALIKE = {
    "options": "Options of the optimizers, such as the learning rate, are others on island {k} "
    "than on island 0 at step {step:g}, so islands would train different models. Set them alike on "
    "all; give a scheduler what all know, such as engine.step().loss.",
    "divisor": 'Losses of step {step:g} are sums on some islands (reduction="sum" or "ddp") and '
    "means, or the other kind of sums, on others: write them in one way.",
    "weights": "Weights before step {step:g} are others on island {k} than on island 0: something "
    "has changed them there alone, since all make the same updates. Write the same values on every "
    "worker, or rank 0's on all: with engine.full_parameters(write=True).",
}
"""What all islands have to report alike, and the message if one does not."""


def _check(reports: Sequence[SumsReport]) -> None:
    """Raise if islands have diverged; the ranks of equal place all raise."""
    first = reports[0]
    for island, report in enumerate(reports):
        if not report.step:
            step = max(other.step for other in reports)
            raise UsageError(
                f"Island {island} has closed its engine, loaded a checkpoint or changed its "
                f"parameters before step {step:g}, and others make that step. Let all islands make "
                "as many, and do these between the same two."
            )
    for island, report in enumerate(reports):
        if report.step != first.step:
            raise UsageError(
                f"Island {island} has made {report.step - 1:g} steps, and island 0 "
                f"{first.step - 1:g}: gradients are added of the same ones. Let all islands make "
                "as many, and go on from the same checkpoint."
            )
        for name, words in _ALIKE.items():
            if getattr(report, name) != getattr(first, name):
                raise ModelMismatch(words.format(k=island, step=first.step))
