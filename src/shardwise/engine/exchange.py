"""Runs the one small collective per step that lets every rank apply the same update."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from shardwise.comm import Collectives, SurvivorGroup
from shardwise.engine.early_update import EarlyUpdate
from shardwise.engine.loss_accumulation import LossAccumulation
from shardwise.engine.step_statistics import Aggregation, StepReport
from shardwise.model.buffers import Buffers
from shardwise.states.gradients.gradients import Gradients
from shardwise.states.step_totals import StepTotals
from shardwise.world.common_calls import CommonCalls


def exchange(
    accumulation: LossAccumulation,
    aggregation: Aggregation,
    gradients: Gradients,
    buffers: Buffers,
    group: Collectives,
    copies: int,
    options: float,
    calls: CommonCalls,
    *,
    unsaved: bool,
    asked: int,
    written: bool,
    counts: bool = True,
    experts: Sequence[int] = (),
    early: EarlyUpdate | None = None,
) -> StepTotals:
    """Exchange the step's statistics, and return their totals across all ranks. Collective.

    It also averages the buffers that forward passes change, weighted by rows, and reduces gradients
    that arrived after a rank had launched their bucket.

    copies    number of ranks that hold the same part of the summed gradient
    options   checksum of the optimizer options, which must be the same on all ranks
    calls     this rank's collective calls since the last step, which all ranks must have made
    unsaved   True if a background save has failed on this rank
    asked     the signal that asks this rank to stop, or 0
    written   True if user code has written to parameters
    counts    True on exactly one rank per replica, because all ranks of a replica see the same
              batches
    experts   number of token copies per expert that this rank reports
    early     launches the update before the host waits for the totals, if this is the only rank

    Raises UsageError on all ranks if gradients are late and `aggregation` does not allow that.
    """
    # Keep the length, because all ranks' vectors must have the same layout.
    nothing = [0.0] * accumulation.backwards
    no_mix = math.inf, -math.inf
    # With `--survive`, the last remaining rank keeps to the path that it took with the others.
    alone = group.size == 1 and not isinstance(group, SurvivorGroup)
    # There is nothing that a single number could differ from.
    has_mix = counts and not (alone and accumulation.mixes == 1)
    mine = StepReport(
        weights=aggregation.report(accumulation.weights if counts else nothing),
        losses=aggregation.report(accumulation.losses if counts else nothing),
        squared_norm=gradients.squared().double() / copies,
        backwards=accumulation.weighted_backwards if counts else 0,
        shares=accumulation.shares if counts else 0.0,
        options=options,
        calls=calls.number(),
        rows=calls.rows,
        shown=sum(accumulation.shown) if counts else 0.0,
        mix=accumulation.mix_range() if has_mix else no_mix,
        copies=buffers.checksum(),
        used=gradients.used,
        late=[number in gradients.late for number in range(len(gradients.buckets))],
        news=not buffers.alone and bool(buffers.news()),
        several=accumulation.backwards > 1,
        unsaved=unsaved,
        asked=asked,
        written=written,
        divisor=accumulation.divisor if accumulation.is_said else -1.0,
        alone=accumulation.needs_sole_loss,
        experts=[float(count) for count in experts],
        buffer_rows=buffers.shares(counts=counts),
    )
    if alone and not buffers.averages:
        # A small model's step on one worker would spend a large part of its time on the vectors.
        read = mine.start_read(group)
        if early is not None:
            early.launch(mine)
        everyone = read().totals_of_one(aggregation)
        buffers.rows = sum(mine.buffer_rows)
    else:
        everyone = _gather(mine, aggregation, buffers, group, counts=counts)
    buffers.stepped()
    squared = everyone.squared_norm
    # Now all ranks know which gradients are late on any rank, so they all start the same reduction.
    if any(everyone.late):
        aggregation.refuse_late(gradients.unforeseen_names(), group)
        gradients.reduce_late([number for number, late in enumerate(everyone.late) if late])
        squared = squared_norm(aggregation, gradients, group, copies)
    # The squares may overflow fp32 even if the gradients are finite.
    elif not math.isfinite(squared):
        if early is not None:
            early.has_updated = False  # the device saw that the norm is not finite
        squared = _squared_in_fp64(aggregation, gradients, group, copies)
    if squared == everyone.squared_norm:
        return everyone
    return replace(everyone, squared_norm=squared)


def _gather(
    mine: StepReport,
    aggregation: Aggregation,
    buffers: Buffers,
    group: Collectives,
    *,
    counts: bool,
) -> StepTotals:
    """Send this rank's report and buffers, average the buffers, and return the totals."""
    # Append the buffers to the report: one collective instead of two.
    report, means = mine.row(group.small_device), buffers.weighted(counts=counts)
    # Evaluate the totals on the CPU: one copy from the GPU, and only one synchronisation per step.
    sent = torch.cat([report, means]) if means.numel() else report
    rows = group.read(group.gather_rows(sent))
    everyone = mine.join(rows[:, : report.numel()].tolist(), aggregation)
    if everyone.news or everyone.copies_differ:
        # A rank saw a change in a buffer that is not averaged yet. Agree on the list of buffers,
        # and send them again. This happens only in the first steps.
        buffers.agree(differ=everyone.copies_differ)
        values = group.read(group.gather_rows(buffers.weighted(counts=counts)))
    else:
        values = rows[:, report.numel() :]
    buffers.average(values, rows[:, report.numel() - len(mine.buffer_rows) : report.numel()])
    return everyone


def squared_norm(
    aggregation: Aggregation, gradients: Gradients, group: Collectives, copies: int
) -> float:
    """Return the squared norm of the summed gradients. Collective.

    `copies` is the number of ranks that hold the same part of the gradient.
    """
    # Convert to fp64 on all ranks: a rank without any gradients has a zero of a different dtype.
    row = (gradients.squared().double() / copies).reshape(-1).to(group.small_device)
    squared = aggregation.total_of_squares(group.read(group.gather_rows(row)).tolist())
    if math.isfinite(squared):
        return squared
    return _squared_in_fp64(aggregation, gradients, group, copies)


def _squared_in_fp64(
    aggregation: Aggregation, gradients: Gradients, group: Collectives, copies: int
) -> float:
    """Return the squared norm, computed in fp64. Call this if fp32 gave inf or NaN. Collective."""
    row = (gradients.squared_in_fp64().double() / copies).reshape(-1)
    report = group.gather_rows(row.to(group.small_device))
    return aggregation.total_of_squares(report.tolist())


def over_stages(totals: StepTotals, group: Collectives) -> StepTotals:
    """Combine the `totals` of all pipeline stages. Collective.

    `group` has one rank per stage. Weights and losses are already identical on every stage, because
    all stages have the same batches.
    """
    flags = [float(totals.several), float(totals.unsaved), float(totals.asked), totals.written]
    flags += [float(totals.rows_differ), totals.calls, float(totals.is_mixed)]
    values = [totals.squared_norm, totals.options, *flags, *map(float, totals.experts)]
    row = torch.tensor(values, dtype=torch.float64)
    rows = group.read(group.gather_rows(row.to(group.small_device)))
    options, calls = rows[:, 1].tolist(), rows[:, 7].tolist()
    return replace(
        totals,
        squared_norm=float(rows[:, 0].sum()),
        # As in StepReport.join, NaN means that ranks differ.
        options=options[0] if len(set(options)) == 1 else math.nan,
        calls=calls[0] if len(set(calls)) == 1 else math.nan,
        rows_differ=bool(rows[:, 6].any()),
        is_mixed=bool(rows[:, 8].any()),
        several=bool(rows[:, 2].any()),
        unsaved=bool(rows[:, 3].any()),
        asked=int(rows[:, 4].max()),
        written=bool(rows[:, 5].any()),
        # Each layer runs on one stage, and the others have counted no tokens for it.
        experts=tuple(map(int, rows[:, 9:].sum(0).tolist())),
    )
