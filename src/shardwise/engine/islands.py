"""Makes islands equal after the steps at which that is due, and tells them of each other.

    after step n    every bucket whose turn it is: send, receive, move (states/island_exchange)
                    n a multiple of H: one small message more: loss, weight, who is to end

Between these steps nothing leaves an island.
"""

from __future__ import annotations

import math
from dataclasses import replace
from zlib import crc32

import torch

from shardwise.engine.engine_state import EngineState
from shardwise.engine.step_statistics import StepStats, StepTotals
from shardwise.states.island_exchange import IslandExchange, Message, send
from shardwise.timeline import span


class Islands:
    """What an engine does between islands, where there are several: nothing, where there is one."""

    def __init__(self, state: EngineState) -> None:
        self._state = state
        self._spec = state.spec
        self._asked = 0
        self._unsaved = False

    @property
    def _exchange(self) -> IslandExchange | None:
        return self._state.states.islands

    def begin(self) -> None:
        """A step is about to change the weights."""
        if self._exchange is not None:
            self._exchange.begin()

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
    ) -> list[list[float]] | None:
        """Send and move what is due; the reports of all islands where those are due too."""
        rule, step, count = self._spec.settings.island_rule, self._state.steps, exchange.buckets
        sent = [i for i in range(count) if rule.sends(step, i, count)]
        due = [i for i in range(count) if rule.is_due(step, i, count)]
        reports = None
        if rule.late:
            exchange.arrive([i for i in due if i in exchange.flying])
        if rule.late and rule.is_due(step, 0, count):
            reports = self._reports(exchange, stats)
        if rule.sends(step, 0, count):
            exchange.report = self._sent_report(totals, stats)
        for index in sent:
            exchange.send(index, step + rule.late)
        if sent and not rule.late:
            reports = self._reports(exchange, stats)
            exchange.arrive(sent)
        if due:
            self._state.parameters_changed()
        return reports

    def _sent_report(self, totals: StepTotals, stats: StepStats) -> Message:
        """Let all islands know of this one."""
        loss = stats.loss if stats.weight else 0.0
        row = [loss, stats.weight, self._asked, self._unsaved, self._form()]
        peers = self._spec.peers
        packed = torch.tensor(row, dtype=torch.float64).view(torch.uint8)
        return send(peers, packed.to(peers.small_device))

    def _form(self) -> int:
        """A checksum of which buffers forward changes here."""
        return crc32(str(self._state.objects.buffers.form()).encode())

    def _reports(self, exchange: IslandExchange, stats: StepStats) -> list[list[float]] | None:
        """The rows of all islands, None where they were sent before this run began; buffers become
        their mean. Collective over the peers."""
        report, exchange.report = exchange.report, None
        rows = None
        if report is None:
            forms = self._spec.peers.gather_plain(self._form())
        else:
            rows = report.wait().cpu().contiguous().view(torch.float64).tolist()
            forms = [row[-1] for row in rows]
        if len(set(forms)) == 1:
            self._average_buffers(stats.weight)
        return rows

    def _average_buffers(self, weight: float) -> None:
        """Give buffers that forward changes their mean over the islands, by the `weight` of the
        step that each has made last."""
        buffers = self._state.objects.buffers
        if not buffers.form():
            return
        values = buffers.values()
        row = torch.cat([values.new_full((1,), weight), values])
        rows = self._spec.peers.gather_rows(row).cpu()
        if float(rows[:, 0].sum()):
            buffers.average(rows[:, 1:], rows[:, :1])
            buffers.remember()

    def _joined(
        self, rows: list[list[float]], totals: StepTotals, stats: StepStats
    ) -> tuple[StepTotals, StepStats]:
        """The step's totals and figures with what the islands reported."""
        self._asked, self._unsaved = 0, False
        totals = replace(
            totals, asked=int(max(row[2] for row in rows)), unsaved=any(row[3] for row in rows)
        )
        if self._spec.settings.late:
            return totals, stats  # the losses are those of an earlier step
        weight = sum(row[1] for row in rows)
        shares = [1.0 if totals.divisor else row[1] for row in rows]
        loss = math.nan
        if weight:
            loss = sum(row[0] * w for row, w in zip(rows, shares, strict=True)) / sum(shares)
        return totals, replace(stats, loss=loss, weight=weight)
