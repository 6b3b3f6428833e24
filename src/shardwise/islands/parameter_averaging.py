"""Averages the parameters of islands after the steps at which that is due.

    after step n    every bucket whose turn it is: send, receive, move (difference_exchange.py)
                    n a multiple of H: one small message more, an IslandReport

Between these steps nothing leaves an island.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor, nn

from shardwise.errors import ModelMismatch, UsageError
from shardwise.islands.anchor import VALUE, Anchor
from shardwise.islands.difference_exchange import DifferenceExchange, Message, send
from shardwise.islands.elastic.collectives import ElasticRun
from shardwise.islands.elastic.returns import IslandReturns
from shardwise.messages.printable import in_bytes, many
from shardwise.model.buffers import Buffers
from shardwise.states.gradients.gradients import Gradients
from shardwise.states.optimizer.interval_gather import IntervalGather
from shardwise.states.optimizer.optimizer_state import OptimizerState
from shardwise.states.parameters.parameters import Parameters
from shardwise.states.step_hooks import HookedCheckpoints, HookedEngine, Kept, StepHooks
from shardwise.states.step_totals import StepStats, StepTotals
from shardwise.states.storage.storage_factory import StorageFactory
from shardwise.timeline import span

WEIGHT = "weight"
"""The key, next to those of the anchor, of the weight of the steps since a parameter was sent."""


class IslandReport(NamedTuple):
    """What an island sends to the others next to its differences, 8 bytes per field."""

    loss: float
    weight: float
    asked: float
    """The signal by which it was asked to end, or 0."""
    unsaved: float
    """Whether a save has failed."""
    form: float
    """A checksum of the names and shapes of the buffers that forward changes."""
    step: float
    anchor: float
    """A checksum of the anchor as it was before this step."""


@dataclass(frozen=True)
class SentBuffers:
    """The buffers that forward changes, as they were when a report was sent."""

    form: int
    rows: float
    """The rows that forwards of the last step saw."""
    values: Tensor


class ParameterAveraging(StepHooks):
    """Hooks of an engine whose islands make their own updates and average parameters."""

    bytes_name = "what islands have in common"
    exchange: DifferenceExchange
    """The differences of the present layout, and the anchor."""

    def __init__(self, *groups: Any) -> None:
        super().__init__(*groups)
        self._rule = self.settings.averaging_rule
        self._asked = 0
        self._unsaved = False
        self._sent: SentBuffers | None = None

    # -- layouts of the states --------------------------------------------------------------

    def lay_out(
        self,
        parameters: Parameters,
        gradients: Gradients,
        optimizer: OptimizerState,
        factory: StorageFactory,
        kept: Kept | None,
    ) -> None:
        anchor = Anchor(
            parameters,
            optimizer,
            self._rule,
            factory,
            self.shard_group,
            scattered=self.scattered,
            start=kept,
        )
        # Only now, since an anchor may not fit into memory: then the layout before stays whole.
        self.parameters = parameters
        self.exchange = DifferenceExchange(anchor, self.peers, begun=kept is not None)
        weights = {} if kept is None else kept[WEIGHT]
        for index, bucket in enumerate(parameters.buckets):
            several = [parameters.named[slot.parameter].parameter for slot in bucket.slots]
            # Parameters that an optimizer got later have no weight yet. The bucket counts all steps
            # since its last exchange, which are those of its oldest parameter.
            self.exchange.weights[index] = max(
                (float(weights[each]) for each in several if each in weights), default=0.0
            )

    def take_apart(self, parameters: Parameters, gathering: IntervalGather) -> Kept | None:
        exchange = self.exchange
        if not exchange.begun:
            return None  # islands begin at the weights that they have at the first step
        exchange.forget()
        weights = {
            parameters.named[slot.parameter].parameter: torch.tensor(weight, dtype=torch.float64)
            for bucket, weight in zip(parameters.buckets, exchange.weights, strict=True)
            for slot in bucket.slots
        }
        anchor = exchange.anchor
        return {WEIGHT: weights} | {k: gathering.tensors(anchor.loaded(k)) for k in anchor.keys}

    def write_common_values(self, kept: Kept | None, optimized: Set[nn.Parameter]) -> None:
        for parameter, value in ({} if kept is None else kept[VALUE]).items():
            if parameter not in optimized:
                parameter.detach().copy_(value)

    def restore_common_weights(self) -> None:
        if self.exchange.begun:
            self.exchange.forget()
            with torch.no_grad():
                self.exchange.anchor.swap()

    # -- what there is ------------------------------------------------------------------------

    @property
    def have_own_weights(self) -> bool:
        return self.exchange.begun

    def common_weights(self) -> AbstractContextManager[None]:
        return self.exchange.anchor.swapped_in()

    @property
    def state_bytes(self) -> int:
        return self.exchange.anchor.state_bytes

    @property
    def copies(self) -> int:  # type: ignore[override]
        return len(self.exchange.anchor.keys)

    def count_in_words(self) -> str:
        return f"{self.peers.size} islands"

    def describe(self) -> str:
        sent = in_bytes(self.exchange.nbytes * (self.peers.size - 1))
        turns = ""
        if self._rule.late:
            turns = f", {many(self.exchange.buckets, 'fragment')} in turn"
        return (
            f"{self.peers.size} islands of {many(self.step_group.size, 'worker')}, which make "
            f"steps of their own: {self._rule.in_words()}{turns}: {sent} sent per worker each time"
        )

    # -- around a step ----------------------------------------------------------------------

    def before_step(self, engine: HookedEngine) -> None:
        """At the first step, take the weights as the first anchor. Collective over all ranks then.

        Not at the start: user code may load or change weights until the first step.
        """
        if self.exchange.begun:
            return
        anchor, group = self.exchange.anchor, self.world_group
        with torch.no_grad():
            anchor.restart()
            # Values differ by bits if islands have loaded different files, and then never become
            # equal: each moves by the same mean difference.
            checksums = group.gather_plain(anchor.checksum())
        if isinstance(group, ElasticRun):
            group.begin()
        length = self.step_group.size
        for rank, each in enumerate(checksums):
            if each != checksums[rank % length]:
                raise ModelMismatch(
                    f"Islands would begin at different weights: those of worker {rank} are not "
                    f"those of worker {rank % length}, which has the same part of the model. Write "
                    "the same values on every worker, or rank 0's on all: "
                    "with engine.full_parameters(write=True)."
                )
        self.exchange.begun = True

    def after_update(
        self, engine: HookedEngine, totals: StepTotals, stats: StepStats
    ) -> tuple[StepTotals, StepStats]:
        """Average what is due. Between boundaries a request to end, or a save that failed, waits
        for the next report: all islands have to learn of it at the same step."""
        self._asked = max(self._asked, totals.asked)
        self._unsaved |= totals.unsaved
        self.exchange.count(0.0 if stats.skipped else stats.weight)
        with span("islands"), torch.no_grad():
            reports = self._average(engine, stats)
        if reports is None:
            # Not yet: an island that saved or ended alone would leave the others waiting.
            return replace(totals, asked=0, unsaved=False), stats
        self._asked, self._unsaved = 0, False
        totals = replace(
            totals,
            asked=int(max(report.asked for report in reports)),
            unsaved=any(report.unsaved for report in reports),
        )
        if self._rule.late:
            return totals, stats  # the reported losses are those of an earlier step
        weight = sum(report.weight for report in reports)
        shares = [1.0 if totals.divisor else report.weight for report in reports]
        loss = math.nan
        if weight:
            loss = sum(r.loss * w for r, w in zip(reports, shares, strict=True)) / sum(shares)
        return totals, replace(stats, loss=loss, weight=weight)

    def _average(self, engine: HookedEngine, stats: StepStats) -> list[IslandReport] | None:
        """Send and move the buckets whose turn it is; returns the reports of all islands if those
        are due too."""
        rule, exchange, step = self._rule, self.exchange, engine.steps
        buffers, count = engine.buffers, exchange.buckets
        sent = [i for i in range(count) if rule.sends(step, i, count)]
        due = [i for i in range(count) if rule.is_due(step, i, count)]
        is_boundary = rule.sends(step, 0, count)
        reports = None
        if rule.late:
            # What was sent `late` steps ago moves the anchor before the next differences to it are
            # taken.
            if rule.is_due(step, 0, count):
                reports = self._receive_reports(buffers)
            exchange.arrive([i for i in due if i in exchange.flying])
            if is_boundary:
                exchange.report = self._send_report(buffers, step, stats)
            for index in sent:
                exchange.send(index, step + rule.late)
        elif is_boundary and self.peers.comes_and_goes:
            report = self._pack_report(buffers, step, stats)
            rows = exchange.gather_at_once(sent, step, report)
            reports = self._read_reports(rows, buffers)
            exchange.arrive(sent)
        elif is_boundary:
            exchange.report = self._send_report(buffers, step, stats)
            # Before anything moves: a report may say that islands have diverged.
            reports = self._receive_reports(buffers)
            exchange.exchange(sent, step)
        return reports

    def returns(self, engine: HookedEngine, checkpoints: HookedCheckpoints) -> IslandReturns | None:
        run = self.world_group
        if not isinstance(run, ElasticRun):
            return None
        return IslandReturns(
            engine,
            checkpoints,
            run,
            self._rule.every,
            # A function, since a new layout has another anchor.
            lambda: self.exchange.anchor.forget_losses(),
        )

    # -- reports and buffers ----------------------------------------------------------------

    def _send_report(self, buffers: Buffers, step: int, stats: StepStats) -> Message:
        report = self._pack_report(buffers, step, stats)
        return send(self.peers, report.to(self.peers.small_device))

    def _pack_report(self, buffers: Buffers, step: int, stats: StepStats) -> Tensor:
        """Return this island's report as bytes, and remember the buffers that belong to it."""
        # Now, not when the reports arrive: with `--late` steps continue meanwhile, and the mean has
        # to be over the same step on all islands.
        self._sent = SentBuffers(_form(buffers), buffers.rows, buffers.values())
        report = IslandReport(
            stats.loss if stats.weight else 0.0,
            stats.weight,
            self._asked,
            self._unsaved,
            self._sent.form,
            step,
            self.exchange.anchor.checksum(),
        )
        return torch.tensor(report, dtype=torch.float64).view(torch.uint8)

    def _receive_reports(self, buffers: Buffers) -> list[IslandReport] | None:
        """Return the reports of all islands, None if they were sent before this run began; average
        the buffers. Collective over the peers. Raises if islands have diverged."""
        message, self.exchange.report = self.exchange.report, None
        if message is not None and self._sent is not None:
            return self._read_reports(list(message.wait().cpu().contiguous()), buffers)
        # A checkpoint has no report in transit, so after a resume there is none to receive.
        sent = SentBuffers(_form(buffers), buffers.rows, buffers.values())
        self._sent = None
        if len(set(self.peers.gather_plain(sent.form))) == 1:
            self._average_buffers(buffers, sent)
        return None

    def _read_reports(self, rows: list[Tensor], buffers: Buffers) -> list[IslandReport]:
        """Return the reports in `rows` of bytes, and average the buffers. Collective over the
        peers. Raises if islands have diverged."""
        # A clone, since fp64 numbers have to be aligned in memory.
        reports = [IslandReport(*row.clone().view(torch.float64).tolist()) for row in rows]
        check_reports(reports, self.peers.places)
        sent, self._sent = self._sent, None
        assert sent is not None, "this island has sent a report"
        if len({report.form for report in reports}) == 1:
            self._average_buffers(buffers, sent)
        return reports

    def _average_buffers(self, buffers: Buffers, sent: SentBuffers) -> None:
        """Set buffers to the mean over the islands of what was `sent`, weighted by the rows of each
        island's last step; with `--late` keep what has changed since."""
        if not sent.values.numel():
            return
        row = torch.cat([sent.values.new_full((1,), sent.rows), sent.values])
        rows = self.peers.gather_rows(row.to(self.peers.small_device)).cpu()
        # If forward has begun to change more buffers since, lengths differ from what was sent: the
        # next boundary averages all of them.
        if float(rows[:, 0].sum()) and _form(buffers) == sent.form:
            values = rows[:, 1:]
            if self._rule.late:
                values = values + (buffers.values() - sent.values).cpu()
            buffers.take((values * rows[:, :1]).sum(0) / rows[:, 0].sum())
            buffers.remember()


def _form(buffers: Buffers) -> int:
    """Return a checksum of which buffers forward changes here."""
    return crc32(str(buffers.form()).encode())


def check_reports(reports: list[IslandReport], islands: Sequence[int]) -> None:
    """Raise if islands have made different numbers of steps or have different anchors; the ranks of
    equal place all raise."""
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
