"""The one small collective of a step: what all ranks must know before they update alike."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.collectives import Collectives
from shardwise.engine.window import Message, Window
from shardwise.model.buffers import Buffers
from shardwise.states.gradients import Gradients


@dataclass(frozen=True)
class Totals:
    """What all ranks know of a step after the exchange, alike.

    `weight` and `loss` (x weight) are sums over the ranks, `squared_norm` that of the summed
    gradients. `used` says by parameter whether any rank had a gradient for it, `several` whether
    any made more than one backward.
    """

    weight: float
    loss: float
    squared_norm: float
    used: list[bool]
    several: bool


def exchange(window: Window, gradients: Gradients, buffers: Buffers, group: Collectives) -> Totals:
    """Tell what this rank has seen and hear it of all others. Collective.

    On the way, buffers that forward changes become their mean over the ranks, and gradients that
    came too late for their bucket on any rank are reduced by all.
    """
    mine = Message(
        weight=window.weight,
        loss=window.loss,
        squared_norm=gradients.squared_norm(),
        used=gradients.used,
        late=[number in gradients.late for number in range(len(gradients.sums))],
        news=bool(buffers.news()),
        several=window.backwards > 1,
    )
    told = mine.row(group.small_device)
    rows = group.gather_rows(torch.cat([told, buffers.values().to(group.small_device)]))
    everyone = mine.join(rows[:, : told.numel()].tolist())
    _average_buffers(buffers, group, rows[:, told.numel() :], rows[:, 0], news=everyone.news)
    squared = float(everyone.squared_norm)
    if any(everyone.late):
        gradients.reduce_late([number for number, late in enumerate(everyone.late) if late])
        row = gradients.squared_norm().reshape(1).to(group.small_device)
        squared = float(group.gather_rows(row).sum())
    return Totals(
        weight=float(everyone.weight),
        loss=float(everyone.loss),
        squared_norm=squared,
        used=everyone.used,
        several=everyone.several,
    )


def _average_buffers(
    buffers: Buffers, group: Collectives, rows: Tensor, weights: Tensor, *, news: bool
) -> None:
    """Average what is followed, and what turns out now to need it; `rows` are the ranks' values."""
    if group.size == 1 or not float(weights.sum()):
        return
    buffers.average(rows, weights)
    if news:
        buffers.follow_agreed()
        values = buffers.values().to(group.small_device)
        buffers.average(group.gather_rows(values), weights)
    buffers.remember()
