"""Averages the islands' parameters every H steps.

    after step n    exchange each bucket that is due (difference_exchange.py)
                    if n is a multiple of H: also exchange a small message, an IslandReport

Islands send nothing after other steps.
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
"""Key, in addition to the anchor's keys, for the weight of the steps since a parameter was sent."""


class IslandReport(NamedTuple):
    """An island's report, which it sends with its differences. Each field has 8 bytes."""

    loss: float
    weight: float
    asked: float
    """The signal that asked the island to stop, or 0."""
    unsaved: float
    """1 if a save has failed, otherwise 0."""
    form: float
    """A checksum of the names and shapes of the buffers that the forward pass changes."""
    step: float
    anchor: float
    """A checksum of the anchor before this step's update."""


@dataclass(frozen=True)
class SentBuffers:
    """The buffers that the forward pass changes, and their values when a report was sent."""

    form: int
    rows: float
    """The number of rows in the forward passes of the last step."""
    values: Tensor


class ParameterAveraging(StepHooks):
    """Step hooks of an engine whose islands update separately and average parameters."""

    bytes_name = "common values of islands"
    exchange: DifferenceExchange
    """The anchor and the exchange of differences, in the current layout of the states."""

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
        # Assign only now: if the anchor does not fit into memory, the old layout stays intact.
        self.parameters = parameters
        self.exchange = DifferenceExchange(anchor, self.peers, begun=kept is not None)
        weights = {} if kept is None else kept[WEIGHT]
        for index, bucket in enumerate(parameters.buckets):
            parameters_here = [parameters.named[slot.parameter].parameter for slot in bucket.slots]
            # Parameters that were added to an optimizer later have no weight yet. The bucket uses
            # the weight of its oldest parameter, which covers all steps since the last exchange.
            self.exchange.weights[index] = max(
                (float(weights[each]) for each in parameters_here if each in weights), default=0.0
            )

    def take_apart(self, parameters: Parameters, gathering: IntervalGather) -> Kept | None:
        exchange = self.exchange
        if not exchange.has_begun:
            return None  # islands start from their weights at the first step
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
        if self.exchange.has_begun:
            self.exchange.forget()
            with torch.no_grad():
                self.exchange.anchor.swap()

    # -- queries ------------------------------------------------------------------------------

    @property
    def have_own_weights(self) -> bool:
        return self.exchange.has_begun

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
            f"{self.peers.size} islands of {many(self.step_group.size, 'worker')}, which update "
            f"separately: {self._rule.in_words()}{turns}: {sent} sent per worker each time"
        )

    # -- around a step ----------------------------------------------------------------------

    def before_step(self, engine: HookedEngine) -> None:
        """Initialise the anchor from the weights, at the first step. Collective over all ranks.

        This cannot happen earlier, because user code may load or change weights before the first
        step.
        """
        if self.exchange.has_begun:
            return
        anchor, group = self.exchange.anchor, self.world_group
        with torch.no_grad():
            anchor.restart()
            # If islands have loaded different files, their weights differ. They would remain
            # different, because every island applies the same mean difference.
            checksums = group.gather_plain(anchor.checksum())
        if isinstance(group, ElasticRun):
            # From now on the run survives the failure of an island. Before, there was no anchor to
            # continue from.
            group.begin()
        # Compare rank r with its peer in the first island, which is rank r % length.
        length = self.step_group.size
        for rank, checksum in enumerate(checksums):
            if checksum != checksums[rank % length]:
                raise ModelMismatch(
                    f"Islands start with different weights: worker {rank} and worker "
                    f"{rank % length} hold the same part of the model with different values. "
                    "Write the same values on every worker, or rank 0's values on all: with "
                    "engine.full_parameters(write=True)."
                )
        self.exchange.has_begun = True

    def after_update(
        self, engine: HookedEngine, totals: StepTotals, stats: StepStats
    ) -> tuple[StepTotals, StepStats]:
        """Average the buckets that are due.

        Requests to stop and failed saves are held back until the next report, because all islands
        must learn of them at the same step.
        """
        self._asked = max(self._asked, totals.asked)
        self._unsaved |= totals.unsaved
        # A skipped step has not changed the weights, so it does not count in the weighted mean.
        self.exchange.count(0.0 if stats.skipped else stats.weight)
        with span("islands"), torch.no_grad():
            reports = self._average(engine, stats)
        if reports is None:
            # Hide it for now: an island that saved or stopped alone would leave the others waiting.
            return replace(totals, asked=0, unsaved=False), stats
        self._asked, self._unsaved = 0, False
        totals = replace(
            totals,
            asked=int(max(report.asked for report in reports)),
            unsaved=any(report.unsaved for report in reports),
        )
        if self._rule.late:
            return totals, stats  # the reported losses are from an earlier step
        # The mean over all islands, as a single process would report it.
        weight = sum(report.weight for report in reports)
        shares = [1.0 if totals.divisor else report.weight for report in reports]
        loss = math.nan
        if weight:
            loss = sum(r.loss * w for r, w in zip(reports, shares, strict=True)) / sum(shares)
        return totals, replace(stats, loss=loss, weight=weight)

    def _average(self, engine: HookedEngine, stats: StepStats) -> list[IslandReport] | None:
        """Send and apply the differences of the buckets that are due.

        Returns all islands' reports, or None if no reports are due in this step.
        """
        rule, exchange, step = self._rule, self.exchange, engine.steps
        buffers, count = engine.buffers, exchange.buckets
        sent = [i for i in range(count) if rule.sends(step, i, count)]
        due = [i for i in range(count) if rule.is_due(step, i, count)]
        is_boundary = rule.sends(step, 0, count)
        reports = None
        if rule.late:
            # Differences sent `late` steps ago must be applied to the anchor before the next
            # differences are computed.
            if rule.is_due(step, 0, count):
                reports = self._receive_reports(buffers)
            exchange.arrive([i for i in due if i in exchange.in_transit])
            if is_boundary:
                exchange.report = self._send_report(buffers, step, stats)
            for index in sent:
                exchange.send(index, step + rule.late)
        elif is_boundary and self.peers.has_changing_ranks:
            report = self._pack_report(buffers, step, stats)
            # Elastic islands exchange all data of a boundary in a single message, because an island
            # may fail at any time.
            rows = exchange.gather_at_once(sent, step, report)
            reports = self._read_reports(rows, buffers)
            exchange.arrive(sent)
        elif is_boundary:
            exchange.report = self._send_report(buffers, step, stats)
            # Read the reports before the anchor changes, because they may show that islands have
            # diverged.
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
            # A function, because every new layout creates a new anchor.
            lambda: self.exchange.anchor.forget_losses(),
        )

    # -- reports and buffers ----------------------------------------------------------------

    def _send_report(self, buffers: Buffers, step: int, stats: StepStats) -> Message:
        report = self._pack_report(buffers, step, stats)
        return send(self.peers, report.to(self.peers.small_device))

    def _pack_report(self, buffers: Buffers, step: int, stats: StepStats) -> Tensor:
        """Return this island's report as uint8, and record the buffers' current values."""
        # Record them now rather than when the reports arrive: with `--late`, training continues in
        # the meantime, and the mean must be over the same step on all islands.
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
        """Return all islands' reports, and average the buffers. Collective over the peers.

        Returns None if the reports were sent before this run was resumed. Raises UsageError or
        ModelMismatch if islands have diverged.
        """
        message, self.exchange.report = self.exchange.report, None
        if message is not None and self._sent is not None:
            return self._read_reports(list(message.wait().cpu().contiguous()), buffers)
        # A checkpoint does not contain reports in transit, so after a resume there is none to
        # receive.
        sent = SentBuffers(_form(buffers), buffers.rows, buffers.values())
        self._sent = None
        if len(set(self.peers.gather_plain(sent.form))) == 1:
            self._average_buffers(buffers, sent)
        return None

    def _read_reports(self, rows: list[Tensor], buffers: Buffers) -> list[IslandReport]:
        """Parse the reports in `rows` (uint8), and average the buffers. Collective over the peers.

        Raises UsageError or ModelMismatch if islands have diverged.
        """
        # Clone, because fp64 values must be aligned in memory.
        reports = [IslandReport(*row.clone().view(torch.float64).tolist()) for row in rows]
        check_reports(reports, self.peers.places)
        sent, self._sent = self._sent, None
        assert sent is not None, "this island has sent a report"
        if len({report.form for report in reports}) == 1:
            self._average_buffers(buffers, sent)
        return reports

    def _average_buffers(self, buffers: Buffers, sent: SentBuffers) -> None:
        """Set the buffers to their mean over islands, weighted by each island's row count.

        The rows are those of the last step before the buffers were sent. With `--late`, changes
        since then are preserved.
        """
        if not sent.values.numel():
            return
        row = torch.cat([sent.values.new_full((1,), sent.rows), sent.values])
        rows = self.peers.gather_rows(row.to(self.peers.small_device)).cpu()
        # If the forward pass now changes more buffers than at the time of sending, the lengths
        # differ. The next boundary then averages all of them.
        if float(rows[:, 0].sum()) and _form(buffers) == sent.form:
            values = rows[:, 1:]
            if self._rule.late:
                values = values + (buffers.values() - sent.values).cpu()
            buffers.take((values * rows[:, :1]).sum(0) / rows[:, 0].sum())
            buffers.remember()


def _form(buffers: Buffers) -> int:
    """Return a checksum that identifies which buffers the forward pass changes."""
    return crc32(str(buffers.form()).encode())


def check_reports(reports: list[IslandReport], islands: Sequence[int]) -> None:
    """Raise UsageError if islands' step counts differ, or ModelMismatch if their anchors do.

    All peers raise the same error.
    """
    first = islands[0]
    for island, report in zip(islands, reports, strict=True):
        if report.step != reports[0].step:
            raise UsageError(
                f"Island {island} has made {report.step:g} steps, but island {first} "
                f"{reports[0].step:g}. Islands average parameters after the same step, so all must "
                "make the same number of steps, and continue from the same checkpoint."
            )
        if report.anchor != reports[0].anchor:
            raise ModelMismatch(
                f"The last common parameters before step {report.step:g} differ between island "
                f"{island} and island {first}, so the islands would never be equal again. Load the "
                "same checkpoint on all workers."
            )
