"""Makes islands equal after the steps at which that is due, and tells them of each other.

    after step n    every bucket whose turn it is: send, receive, move (states/island_exchange)
                    n a multiple of H: one small message more, a Report

Between these steps nothing leaves an island.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from shardwise.comm import ElasticRun
from shardwise.engine.engine_state import EngineState
from shardwise.engine.step_statistics import StepStats, StepTotals
from shardwise.errors import ModelMismatch, UsageError
from shardwise.islands.island_exchange import IslandExchange, Message, send
from shardwise.timeline import span


class Report(NamedTuple):
    """What an island tells the others beside differences, 8 bytes each."""

    loss: float
    weight: float
    asked: float
    """The signal by which it was asked to end, or 0."""
    unsaved: float
    """Whether a save has failed."""
    form: float
    """A checksum of which buffers forward changes."""
    step: float
    anchor: float
    """A checksum of the anchor as it was before this step."""


@dataclass(frozen=True)
class SentBuffers:
    """The buffers that forward changes, as they were when a report was sent."""

    form: int
    rows: float
    """That forwards of the step that was made last saw."""
    values: Tensor


class Islands:
    """What an engine does between islands, where there are several: nothing, where there is one."""

    def __init__(self, state: EngineState) -> None:
        self._state = state
        self._spec = state.spec
        self._asked = 0
        self._unsaved = False
        self._sent: SentBuffers | None = None

    @property
    def _exchange(self) -> IslandExchange | None:
        return self._state.states.islands

    def begin(self) -> None:
        """A step is about to change the weights: what user code has made of them until then is
        where islands begin, all at the same. Collective over all ranks at the first step."""
        exchange = self._exchange
        if exchange is None or exchange.begun:
            return
        with torch.no_grad():
            exchange.anchor.restart()
            self._check_alike(exchange.anchor.checksum())
        exchange.begun = True

    def _check_alike(self, mine: int) -> None:
        """Raise ModelMismatch, on all ranks alike, where islands are not at the same weights."""
        group = self._spec.world_group
        all_of_them = group.gather_plain(mine)
        if isinstance(group, ElasticRun):
            group.begin()
        length = self._spec.step_group.size
        for rank, each in enumerate(all_of_them):
            if each != all_of_them[rank % length]:
                raise ModelMismatch(
                    f"Islands would begin at different weights: those of worker {rank} are not "
                    f"those of worker {rank % length}, which has the same part of the model. Write "
                    "the same values on every worker, or rank 0's on all: "
                    "with engine.full_parameters(write=True)."
                )

    def stepped(self, totals: StepTotals, stats: StepStats) -> tuple[StepTotals, StepStats]:
        """Make equal what is due after a step; returns what all ranks of the run know of it.

        That one asks to end, or could not save, all islands know when they are equal.
        """
        exchange = self._exchange
        if exchange is None:
            return totals, stats
        self._asked = max(self._asked, totals.asked)
        self._unsaved |= totals.unsaved
        exchange.count(0.0 if stats.skipped else stats.weight)
        with span("islands"), torch.no_grad():
            known = self._make_equal(exchange, totals, stats)
        if known is None:
            return replace(totals, asked=0, unsaved=False), stats
        return self._joined(known, totals, stats)

    def _make_equal(
        self, exchange: IslandExchange, totals: StepTotals, stats: StepStats
    ) -> list[Report] | None:
        """Send and move what is due; the reports of all islands where those are due too."""
        rule, step, count = self._spec.settings.island_rule, self._state.steps, exchange.buckets
        sent = [i for i in range(count) if rule.sends(step, i, count)]
        due = [i for i in range(count) if rule.is_due(step, i, count)]
        reports = None
        if rule.late and rule.is_due(step, 0, count):
            reports = self._reports(exchange)
        if rule.late:
            exchange.arrive([i for i in due if i in exchange.flying])
        if rule.sends(step, 0, count) and not self._spec.peers.comes_and_goes:
            exchange.report = self._sent_report(exchange, stats)
        if rule.late:
            for index in sent:
                exchange.send(index, step + rule.late)
        elif self._spec.peers.comes_and_goes and rule.sends(step, 0, count):
            report = self._packed_report(exchange, stats)
            reports = self._heard(exchange.gather_at_once(sent, step, report))
            exchange.arrive(sent)
        elif exchange.report is not None:
            # Before anything moves: a report may say that islands are no longer alike.
            reports = self._reports(exchange)
            exchange.exchange(sent, step)
        if due:
            self._state.parameters_changed()
        return reports

    def _sent_report(self, exchange: IslandExchange, stats: StepStats) -> Message:
        """Let all islands know of this one."""
        peers = self._spec.peers
        return send(peers, self._packed_report(exchange, stats).to(peers.small_device))

    def _packed_report(self, exchange: IslandExchange, stats: StepStats) -> Tensor:
        """What all islands are to know of this one, as bytes."""
        self._sent = self._buffers()
        loss = stats.loss if stats.weight else 0.0
        report = Report(
            loss,
            stats.weight,
            self._asked,
            self._unsaved,
            self._sent.form,
            self._state.steps,
            exchange.anchor.checksum(),
        )
        return torch.tensor(report, dtype=torch.float64).view(torch.uint8)

    def _buffers(self) -> SentBuffers:
        buffers = self._state.objects.buffers
        return SentBuffers(self._form(), buffers.rows, buffers.values())

    def _form(self) -> int:
        """A checksum of which buffers forward changes here."""
        return crc32(str(self._state.objects.buffers.form()).encode())

    def _reports(self, exchange: IslandExchange) -> list[Report] | None:
        """The reports of all islands, None where they were sent before this run began; buffers
        become their mean. Collective over the peers. Raises where islands have come apart."""
        message, exchange.report = exchange.report, None
        if message is not None and self._sent is not None:
            return self._heard(list(message.wait().cpu().contiguous()))
        sent, self._sent = self._buffers(), None
        if len(set(self._spec.peers.gather_plain(sent.form))) == 1:
            self._average_buffers(sent)
        return None

    def _heard(self, rows: list[Tensor]) -> list[Report]:
        """The reports in what islands have sent as bytes; buffers become their mean. Collective
        over the peers. Raises where islands have come apart."""
        reports = [Report(*row.clone().view(torch.float64).tolist()) for row in rows]
        _check_reports(reports, self._spec.peers.places)
        sent, self._sent = self._sent, None
        assert sent is not None, "this island has sent a report"
        if len({report.form for report in reports}) == 1:
            self._average_buffers(sent)
        return reports

    def _average_buffers(self, sent: SentBuffers) -> None:
        """Give buffers that forward changes the mean over the islands of what was `sent`, by the
        rows of the step that each had made last; with `--late` what has changed since stays."""
        buffers, peers = self._state.objects.buffers, self._spec.peers
        if not sent.values.numel():
            return
        row = torch.cat([sent.values.new_full((1,), sent.rows), sent.values])
        rows = peers.gather_rows(row.to(peers.small_device)).cpu()
        # Where forward has changed others since, their lengths are not those that were sent: they
        # become alike at the next boundary.
        if float(rows[:, 0].sum()) and self._form() == sent.form:
            values = rows[:, 1:]
            if self._spec.settings.late:
                values = values + (buffers.values() - sent.values).cpu()
            buffers.take((values * rows[:, :1]).sum(0) / rows[:, 0].sum())
            buffers.remember()

    def _joined(
        self, reports: list[Report], totals: StepTotals, stats: StepStats
    ) -> tuple[StepTotals, StepStats]:
        """The step's totals and figures with what the islands reported."""
        self._asked, self._unsaved = 0, False
        totals = replace(
            totals,
            asked=int(max(report.asked for report in reports)),
            unsaved=any(report.unsaved for report in reports),
        )
        if self._spec.settings.late:
            return totals, stats  # the losses are those of an earlier step
        weight = sum(report.weight for report in reports)
        shares = [1.0 if totals.divisor else report.weight for report in reports]
        loss = math.nan
        if weight:
            loss = sum(r.loss * w for r, w in zip(reports, shares, strict=True)) / sum(shares)
        return totals, replace(stats, loss=loss, weight=weight)


def _check_reports(reports: list[Report], islands: Sequence[int]) -> None:
    """Raise where islands have made different numbers of steps, or have lost what they had in
    common; on the ranks of equal place alike."""
    first = islands[0]
    for island, report in zip(islands, reports, strict=True):
        if report.step != reports[0].step:
            raise UsageError(
                f"Island {island} has made {report.step:g} steps, and island {first} "
                f"{reports[0].step:g}: parameters are made equal after the same ones. Let all "
                "islands make as many, and go on from the same checkpoint."
            )
        if report.anchor != reports[0].anchor:
            raise ModelMismatch(
                f"What islands had in common before step {report.step:g} is another on island "
                f"{island} than on island {first}, so they would never be equal again. Load a "
                "checkpoint on all workers alike."
            )
