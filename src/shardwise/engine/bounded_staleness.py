"""Makes gradients equal over islands at every step, and gives a step those of some steps before.

    step n    this island's sums are there    send them, and a Report beside
              those of step n - S, of all     wait, and let them be the sums that this step uses

The gradients of a step are so computed with weights that at most S updates have changed since:
bounded staleness, as in the stale synchronous parallel parameter server (Ho et al., 2013). Here the
delay is always S steps, whoever is early, so that every run has the same bits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from zlib import crc32

import torch

from shardwise.engine.engine_state import EngineState
from shardwise.engine.exchange import squared_norm
from shardwise.engine.island_report import Report, read, row_of
from shardwise.engine.step_statistics import StepStats, StepTotals
from shardwise.errors import ModelError, ModelMismatch, UsageError
from shardwise.islands.delayed_sums import DelayedSums, Flight
from shardwise.layout import fingerprints
from shardwise.timeline import span

CHECK_EVERY = 30
"""Steps from one comparison of the islands' weights to the next."""


class BoundedStaleness:
    """Delays the gradients of an engine whose islands make them equal; nothing where they do
    not."""

    def __init__(self, state: EngineState) -> None:
        self._state = state
        self._spec = state.spec
        self._staleness = 0
        self._waited = 0.0

    @property
    def _sums(self) -> DelayedSums | None:
        return self._state.states.delayed

    def delayed(self, totals: StepTotals) -> StepTotals:
        """Send the sums of this step, which all ranks of the island know the `totals` of, and
        return those of the step whose sums stand in their place now. Collective.

        Without such a step, in the first ones of a run, they weigh nothing. Raises where islands
        have come apart, and ModelError for a model whose buffers change.
        """
        sums, rule = self._sums, self._spec.staleness
        if sums is None or rule is None:
            return totals
        step = self._state.steps + 1
        self._check_buffers()
        with torch.no_grad():
            self._send(sums, step, totals)
            with span("islands"):
                flight = sums.due(step - rule.behind)
                if flight is None:
                    return _nothing(totals)
                return self._used(sums, flight, totals)

    def _check_buffers(self) -> None:
        if self._state.objects.buffers.form():
            raise ModelError(
                f"--behind {self._spec.settings.behind} with a model whose forward changes its "
                "buffers, as BatchNorm does its running statistics: those would be other ones on "
                "each island. Take GroupNorm or LayerNorm, or leave --behind out, so that islands "
                "make parameters and buffers equal every --equal-every steps."
            )

    # -- out ----------------------------------------------------------------------------------

    def _send(self, sums: DelayedSums, step: int, totals: StepTotals) -> None:
        finite = math.isfinite(totals.squared_norm)
        report = Report(
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
            self._checksum() if step % CHECK_EVERY == 1 else 0.0,
            self._state.scale.value,
            sums.updates,
        )
        row = torch.tensor(row_of(report, totals.used), dtype=torch.float64)
        # Sums are of seeds that each step chooses anew: sent are those that a seed of 1 would give.
        sums.send(step, row, 1.0 / self._state.weighting.divisor(1.0), counts=finite)

    def _checksum(self) -> float:
        """32 bits of this rank's part of the weights: equal on those of equal place."""
        several = [
            fingerprints.sums_of(interval.master.loaded())
            for interval in self._state.states.optimizer.intervals
        ]
        return float(crc32(repr(several).encode()))

    # -- and in -------------------------------------------------------------------------------

    def _used(self, sums: DelayedSums, flight: Flight, totals: StepTotals) -> StepTotals:
        """Let the gradients be those of `flight`; returns their totals."""
        begun = time.monotonic()
        reports, used = read(sums.reported(flight), len(totals.used))
        _check(reports)
        sums.land(flight)
        self._waited += time.monotonic() - begun
        self._staleness = sums.updates - int(reports[0].updates)
        theirs = _joined(totals, reports, used, self._spec.replicas)
        if not theirs.weight:
            return theirs
        if not math.isfinite(theirs.squared_norm):
            sums.spoil(used)
            return theirs
        # Before the sums come to rest: in their units, which are alike on all islands.
        self._state.weighting.follow_step(theirs)
        sums.use(flight, self._state.weighting.divisor(1.0))
        return replace(theirs, squared_norm=self._squared_norm())

    def _squared_norm(self) -> float:
        """That of the sums as they are now, over all layers. Collective over the island."""
        state, spec = self._state, self._spec
        squared = squared_norm(
            state.aggregation, state.states.gradients, spec.stage_group, spec.shard_group.copies
        )
        if spec.pipeline is None:
            return squared
        group = spec.pipeline.group
        row = torch.tensor([squared], dtype=torch.float64, device=group.small_device)
        return float(group.read(group.gather_rows(row)).sum())

    def stepped(self, stats: StepStats) -> StepStats:
        """A step was made; returns its figures, with what is known of the delay."""
        sums = self._sums
        if sums is None:
            return stats
        sums.stepped(self._state.steps)
        sums.updates += not stats.skipped
        stats = replace(stats, staleness=self._staleness, waited=self._waited)
        self._staleness, self._waited = 0, 0.0
        return stats


def _nothing(totals: StepTotals) -> StepTotals:
    """The totals of a step before the first whose sums are used."""
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


def _joined(
    totals: StepTotals, reports: Sequence[Report], used: list[bool], replicas: int
) -> StepTotals:
    """What all islands know of the step that was reported. Of gradients that are not finite on one
    the squared norm is infinite."""
    backwards = sum(report.backwards for report in reports)
    return replace(
        totals,
        weight=sum(report.weight for report in reports),
        shown=sum(report.shown for report in reports),
        loss=sum(report.loss for report in reports),
        squared_norm=0.0 if all(report.finite for report in reports) else math.inf,
        backwards=int(backwards),
        # Islands report no shares: the unit that follows from them is an estimate, and needs only
        # be alike on all.
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
"""What islands report alike, and what there is to say where they do not."""


def _check(reports: Sequence[Report]) -> None:
    """Raise where islands have come apart, on the ranks of equal place alike."""
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
