"""Defines a step's results: totals that all ranks agree on, and statistics for users."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from shardwise.parallel.expert.expert_counts import ExpertCounts


@dataclass(frozen=True)
class StepStats:
    """Statistics of a step across all workers.

    They are identical on every rank, except for `waited` and `tokens_per_second`.

    If groups of ranks step independently (islands), the values describe this rank's group. After a
    step that averages parameters (`--late 0`), `loss` and `weight` cover all groups.

    With `--behind S` the values cover all groups. They describe the gradients that this step
    applied, which were computed S steps earlier. The first S steps have no gradients to apply:
    their values are NaN, and `skipped` is True.

    Attributes:
        loss: Mean loss over all items of all workers and micro-batches. If the losses are sums,
            their sum; with `reduction="ddp"`, the mean of the workers' sums.
        grad_norm: Global 2-norm of the gradient before clipping.
        weight: Number of items in the step.
        skipped: True if nothing was updated, because the total weight was zero or a gradient
            overflowed under a loss scale.
        staleness: Number of updates that changed the weights after the applied gradients were
            computed; at most S, and 0 without `--behind`.
        waited: Time in seconds that this rank waited for the gradients of other groups.
        tokens: Number of tokens in the step's batches on all workers, including tokens without a
            label. 0 unless a Loader with `tokens` yielded the batches.
        padding: Fraction of the positions computed on all workers that is padding, between 0 and 1.
        tokens_per_second: `tokens` divided by the time since the previous step, in 1/s. 0 in the
            first step. Measured on this rank's host, without waiting for its device.
        experts: Maps the name of each expert layer to the number of token copies per expert in this
            step, over all workers and micro-batches. Includes `sw.MoE` layers and, with
            `--expert`, Transformers' experts.
        repeated: True if a worker was lost in the step, with `--survive` and in a plain loop over a
            Loader. Nothing was updated, `skipped` is True, and the Loader yields the same rows
            again.

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
    tokens: int = 0
    padding: float = 0.0
    # Not compared, because the other values are the same on all ranks.
    tokens_per_second: float = field(default=0.0, compare=False)
    experts: Mapping[str, ExpertCounts] = field(default_factory=dict)
    repeated: bool = False


@dataclass(frozen=True, kw_only=True)
class StepTotals:
    """Totals of a step that all ranks exchange. Their values are identical on every rank.

    Attributes:
        weight: Sum of the weights of all losses.
        shown: The weight shown to users.
        loss: Sum of loss x weight.
        squared_norm: Squared norm of the summed gradients.
        backwards: Number of backward passes with a nonzero weight.
        shares: Sum of the values that seeded autograd.
        options: Checksum of the optimizers' options; NaN if ranks differ.
        calls: Checksum of the calls that must be identical on all ranks; NaN if they differ.
        rows_differ: True if ranks took their shares from different batches.
        is_mixed: True if the losses have different units, so that no weight is right for all of
            them.
        copies_differ: True if ranks disagree about buffers or frozen parameters that are not
            averaged.
        used: For each parameter, whether any rank had a gradient for it.
        late: For each bucket, whether a gradient arrived on any rank after the bucket was launched.
        news: True if a rank has seen a buffer change for the first time.
        several: True if a rank ran more than one backward pass.
        unsaved: True if a background save has failed.
        asked: Number of the signal that asked any rank to stop, or 0.
        written: True if user code has written to parameters on any rank.
        divisor: Divisor of the summed losses; 0 if they are means, NaN if ranks differ.
        scale: Loss scale of the gradients, if they belong to an earlier step.
        experts: Number of token copies per expert in the step, concatenated over layers.
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
    experts: tuple[int, ...] = ()

    @property
    def denominator(self) -> float:
        """Divisor of the summed losses and gradients."""
        return self.divisor or self.weight

    @property
    def alike(self) -> bool:
        """True if the optimizers have the same options on all ranks."""
        return not math.isnan(self.options)
