"""Results of a step: the totals that all ranks agree on, and the statistics that users see."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class StepStats:
    """Statistics of one step over all workers: plain numbers, equal on every rank but `waited`.

    If groups of ranks step apart (islands), the numbers describe the group of this rank. After a
    step that averages parameters (`--late 0`), `loss` and `weight` cover all groups.

    With `--behind S` the numbers cover all groups. They describe the gradients that this step
    applied, which were computed S steps earlier. The first S steps have no gradients to apply:
    the numbers are NaN, and `skipped` is True.

    Attributes:
        loss: Mean loss over all items of all workers and micro-batches. If the losses are sums,
            their sum; with `reduction="ddp"`, the mean of the workers' sums.
        grad_norm: Global 2-norm of the gradient before clipping.
        weight: Number of items in the step.
        skipped: True if nothing was updated, because the total weight was zero or a gradient
            overflowed under a loss scale.
        staleness: Number of updates that changed the weights after the applied gradients were
            computed; at most S, and 0 without `--behind`.
        waited: Seconds for which this rank waited for the gradients of other groups.

    Example:
        A line in a training loop:

            stats = engine.step(max_norm=1.0)
            print(f"loss {stats.loss:.3f}, gradient norm {stats.grad_norm:.2f}")
    """

    loss: float
    grad_norm: float
    weight: float
    skipped: bool
    staleness: int = 0
    waited: float = 0.0


@dataclass(frozen=True, kw_only=True)
class StepTotals:
    """Totals of a step that its exchange makes known to all ranks, with equal values on each.

    Attributes:
        weight: Sum of the weights of all losses.
        shown: The weight that users see.
        loss: Sum of loss x weight.
        squared_norm: Squared norm of the summed gradients.
        backwards: Number of backwards that had a weight.
        shares: Sum of the values that seeded autograd.
        options: Checksum of the optimizers' options; NaN if ranks differ.
        calls: Checksum of the calls that all ranks must make in the same way; NaN if they differ.
        rows_differ: Ranks took their shares from different batches.
        is_mixed: The losses have different units, so no weight is right for all of them.
        copies_differ: Buffers or frozen parameters that are not averaged differ between ranks.
        used: By parameter, whether any rank had a gradient for it.
        late: By bucket, whether a gradient arrived on any rank after the bucket had started.
        news: A buffer was seen to change for the first time.
        several: A rank made more than one backward.
        unsaved: A save in the background has failed.
        asked: The signal that asked any rank to end, or 0.
        written: User code has written into parameters of any rank.
        divisor: Divisor of the summed losses; 0 if they are means, NaN if ranks differ.
        scale: The loss scale of gradients that belong to an earlier step.
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
        """The divisor of the summed losses and gradients."""
        return self.divisor or self.weight

    @property
    def alike(self) -> bool:
        """Whether the optimizers have the same options on all ranks."""
        return not math.isnan(self.options)
