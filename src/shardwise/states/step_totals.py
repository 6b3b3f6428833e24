"""Holds the numbers of a step: those that all ranks know of it, and those that users see."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class StepStats:
    """What a step did, over all workers. Plain numbers, alike on all ranks.

    `loss` is the mean over all items of all workers and micro-batches, or their sum where the
    losses were sums (with reduction="ddp" the mean of the workers' sums); `weight` is the number of
    items, `grad_norm` the global 2-norm of the gradient before clipping. `skipped` when nothing was
    updated: the total weight was zero, or a gradient overflowed under a loss scale.

    If groups of ranks step apart, the numbers are those of this group, the same on its ranks. After
    a step that averages parameters (`--late 0`), `loss` and `weight` are those of all groups.

    With `--behind S` they are those of all workers, and of the gradients that were used: of S steps
    before. `staleness` says how many updates had changed the weights since these were computed, at
    most S; `waited` how many seconds this rank has waited for those of the other groups. The first
    S steps have none to use: NaN, and `skipped`.
    """

    loss: float
    grad_norm: float
    weight: float
    skipped: bool
    staleness: int = 0
    waited: float = 0.0


@dataclass(frozen=True, kw_only=True)
class StepTotals:
    """What all ranks know of a step after its exchange, alike.

    `weight` and `loss` (x weight) are sums over the ranks, `shown` is what users see of the
    weight; `is_mixed` says that no weight is right for all losses. `squared_norm` is that of
    the summed gradients. `backwards` is the number of those that had a weight, `shares` their
    seeds added up, `options` the checksum of the optimizers' options, and `calls` that of the
    calls that all make alike, NaN where ranks differ. `rows_differ`: ranks have shared
    different batches. `copies_differ`: buffers or frozen parameters that are not averaged
    differ between ranks. `used` says by parameter whether any rank had a gradient for it,
    `late` by bucket whether any came after it had started; `news` whether a buffer was seen to
    change for the first time, `several` whether any rank made more than one backward, `unsaved`
    whether a save in the background has failed. `asked` is the signal that asked any to end, or
    0. `written` says whether user code has written into parameters of any rank, `divisor` what
    the added losses are divided by, 0 for means: NaN where ranks differ. `scale` is the loss
    scale that gradients of an earlier step had.
    """

    weight: float
    shown: float
    loss: float
    squared_norm: float
    backwards: int
    shares: float
    options: float
    calls: float
    rows_differ: bool
    is_mixed: bool
    copies_differ: bool
    used: list[bool]
    late: list[bool]
    news: bool
    several: bool
    unsaved: bool
    asked: int
    written: bool
    divisor: float
    scale: float | None = None

    @property
    def denominator(self) -> float:
        """What the added losses and gradients are divided by."""
        return self.divisor or self.weight

    @property
    def alike(self) -> bool:
        """Whether the optimizers' options are."""
        return not math.isnan(self.options)
