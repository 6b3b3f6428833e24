"""Weights gradients, so that their sum is that of the mean over all items of all workers.

Each rank's loss is a mean over `weight` items. Its gradient enters the sum over micro-batches and
ranks multiplied by weight / unit. The total weight is summed next to it, and one division in the
update makes the sum the mean. The factor has two parts:

    weight / unit  =  seed         of autograd: what hooks and autograd.Functions in the graph see
                      x rest       applied to each gradient on its way to its bucket

The seed is the loss's share of the mean that one process would compute: its rows / the rows of
the total batch. So code in the graph that is not linear (a hook that clamps) computes what it
computes in one process. With one worker and a whole batch the seed is 1, as `loss.backward()` has
it. A loss that is a sum (reduction="sum" or "ddp") always has a seed of 1.

The unit is the last step's total weight over its total of shares. So the rest is 1, and costs
nothing, as long as weights are proportional to rows and batches have one size. It is not 1 for
weights such as tokens, around a short batch, and if a 16-bit loss rounds its seed. The weight of
the only backward of a step on the only worker cancels out: it is left out (`is_sole`). If another
backward follows after all, the unit becomes the one for which the first rest is 1. With
--sync-batch-norm the seed has the whole factor: gradients cross between ranks inside the graph
there, and a rest that is applied afterwards would multiply those of other ranks' losses too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.comm import Collectives
from shardwise.engine.loss_terms import UNKNOWN, LossTerms
from shardwise.engine.step_statistics import Aggregation, StepTotals
from shardwise.errors import UsageError
from shardwise.model.loss_scale import LossScale
from shardwise.model.precision import NARROW
from shardwise.world.current_batch import Batch

REDUCTIONS = ("mean", "sum", "ddp")


@dataclass(frozen=True, kw_only=True)
class LossWeight:
    """How a loss counts in its step: its gradient is multiplied by `factor` before it is added,
    and the number of items that the step has seen grows by `items`.

    Where losses are means both are the weight, and the sum is divided by all items. Where they are
    sums the factor is 1, and nothing is divided. `shown` is what users see of the items: rows where
    a loss is a mean over the elements of whole rows.
    """

    factor: float | Tensor
    items: float | Tensor
    shown: float | Tensor


def weigh(
    batch: Batch | None,
    weight: float | Tensor | None,
    *,
    summed: bool,
    terms: LossTerms = UNKNOWN,
) -> LossWeight:
    """How a loss of `batch` counts: a mean over `weight` items, or `summed` over them.

    Without `weight` it is what the `terms` of the loss say, else the samples of the batch, and 1
    without a batch. A stand-in weighs nothing whatever is given. A number that lives on a GPU stays
    there, as a 0-dim tensor.
    """
    shown = items = _items(weight, batch)
    if summed:
        return LossWeight(factor=1.0 if items else 0.0, items=items, shown=items)
    if weight is None and not (batch is not None and batch.samples == 0):
        if terms.main is not None:
            items = terms.main.items
            shown = shown if terms.main.has_rows else items
        elif terms.is_zero:
            shown = items = 0.0
    return LossWeight(factor=items, items=items, shown=shown)


def share_of(batch: Batch | None, *, summed: bool, replicas: int, islands: int = 1) -> float:
    """Return which part of the loss of one process a loss of `batch` is; its backward starts with
    that, as the gradient of the one process would.

    A mean over some of the rows of a total batch counts by its rows. Without a batch the
    `replicas` are taken to have equal parts. A sum counts whole. A total batch is that of all
    `islands`, and each of them makes the mean over its own part.
    """
    if batch is not None and batch.samples == 0:
        return 0.0
    if summed:
        return 1.0
    if batch is None or not batch.total:
        return 1.0 / replicas
    return batch.samples * islands / batch.total


def divisor_of(reduction: str, *, weighted: bool, replicas: int) -> float:
    """What the added losses of a step are divided by: 1 for sums, the number of `replicas` for
    "ddp", and 0 for means, which are divided by the items that the step has seen. Raises UsageError
    for another word, and for a weight beside a reduction that has none."""
    if reduction not in REDUCTIONS:
        raise UsageError(f"reduction is one of {', '.join(REDUCTIONS)}, not {reduction!r}.")
    if reduction == "mean":
        return 0.0
    if weighted:
        raise UsageError(
            f'weight= says what a mean is over, and reduction="{reduction}" that this loss is '
            "added as it is: leave one of them out."
        )
    return float(replicas) if reduction == "ddp" else 1.0


def _items(given: float | Tensor | None, batch: Batch | None) -> float | Tensor:
    if batch is not None and batch.samples == 0:
        return 0.0
    if given is None:
        return float(batch.samples) if batch is not None else 1.0
    if isinstance(given, Tensor):
        if given.numel() != 1:
            shape = tuple(given.shape)
            raise UsageError(f"weight takes one number, not a tensor of shape {shape}.")
        if given.device.type != "cpu":
            return given.detach().double().reshape(())
        given = given.item()
    if not 0 <= given < math.inf:
        raise UsageError(f"weight takes a number of 0 or more, not {given}.")
    return float(given)


class GradientWeighting:
    """Computes the seeds of backward and the divisor of the gradients, alike on all ranks."""

    def __init__(
        self,
        scale: LossScale,
        group: Collectives,
        parts: Aggregation,
        *,
        crosses: bool = False,
        alone: bool = False,
    ) -> None:
        """`alone`: one worker makes the whole step, in any order of sums."""
        self._scale = scale
        self._group = group
        self._parts = parts
        self._crosses = crosses
        """Whether gradients cross between ranks inside the graph."""
        self._alone = alone
        self._sole: tuple[float | Tensor, float] | None = None
        """The weight and the share of this step's only backward so far, if its weight was left
        out."""
        self._had_several = False
        self._unit: float | None = None
        self._varies = False
        """Whether weights are others than 1, so that units differ by no powers of two alone."""

    def begin(self, weight: float | Tensor, share: float) -> None:
        """Estimate the unit from the `weight` and the `share` of each rank's first backward; the
        first call is collective."""
        if self._unit is None:
            row = torch.as_tensor(weight, dtype=torch.float64, device=self._group.small_device)
            row = torch.stack([row.reshape(()), torch.full_like(row.reshape(()), share)])
            rows = self._group.read(self._group.gather_rows(row))
            total, count = self._parts.first_step(rows[:, 0].tolist())
            self.follow(total, count, self._parts.first_step(rows[:, 1].tolist())[0])

    def is_sole(self, weight: float | Tensor, share: float) -> bool:
        """Whether the first backward of a step is probably its only one, on the only worker."""
        has_weight = isinstance(weight, Tensor) or weight > 0
        return self._alone and not self._had_several and has_weight and share > 0

    def settle(self) -> bool:
        """Prepare for another backward of the step. Returns False if the gradients so far must be
        dropped: their weight is 0 after all, and they may be NaN.

        Waits for a GPU that has the weight of the first one, which the next steps avoid.
        """
        if self._sole is None:
            return True
        weight, share = float(self._sole[0]), self._sole[1]
        self._sole = None
        if weight > 0:
            self._unit = weight / share
        return weight > 0

    def seed(
        self, loss: Tensor, weight: float | Tensor, share: float, *, is_sole: bool = False
    ) -> tuple[Tensor, float | Tensor]:
        """Return the seed of a backward of `loss`, in its dtype, and the factor by which its
        gradients are still to be multiplied. The first call is collective.

        `share` is the part of the one-process loss that `loss` is. If it `is_sole`, its weight is
        left out.
        """
        self.begin(weight, share)
        self._sole = (weight, share) if is_sole else None
        whole = share * self._scale.value if is_sole else weight / self._divisor
        if self._crosses and isinstance(whole, Tensor):
            # In fp64 on its device. Reading it would wait for the device.
            narrow = whole.to(loss.dtype)
            rest = torch.where(narrow == 0, 1.0, whole / narrow) if loss.dtype in NARROW else 1.0
            return narrow.view_as(loss), rest
        seed = float(whole) if self._crosses else share * self._scale.value
        if loss.dtype in NARROW:
            seed = _rounded(seed, loss.dtype)
        rest = whole / seed if seed else 1.0
        if not isinstance(rest, Tensor) and math.isclose(rest, 1.0, rel_tol=1e-12):
            rest = 1.0  # no multiplication for the rounding of the quotients
        # Filled in there: a copy to a GPU would wait for it.
        filled = torch.full((), seed, dtype=loss.dtype, device=loss.device)
        return filled.view_as(loss), rest

    def divisor(self, total_weight: float) -> float:
        """The number that turns summed gradients into their mean, by division."""
        if self._sole is not None:
            return self._sole[1] * self._scale.value
        return total_weight / self._divisor

    def clear(self, *, several: bool | None = None) -> None:
        """Begin another step; the one before had `several` backwards, if it was made."""
        self._sole = None
        self._had_several = self._had_several if several is None else several

    def follow(self, total_weight: float, count: int, shares: float) -> None:
        """Take the total weight of a step with `count` backwards, whose seeds add up to `shares`,
        as an estimate of the next."""
        self._varies = total_weight != count
        # The exact mode needs the same bits however ranks have added the shares up.
        shares = round(shares * _SHARE_GRAIN) / _SHARE_GRAIN
        self._unit = total_weight / shares if total_weight > 0 and shares > 0 else 1.0

    def follow_step(self, totals: StepTotals) -> None:
        """The same of what all ranks know of a step that weighs something."""
        factors = totals.backwards if totals.divisor else totals.weight
        self.follow(factors, totals.backwards, totals.shares)

    @property
    def unit(self) -> float | None:
        """The weight whose seed is 1; None before the first backward."""
        return self._unit

    @unit.setter
    def unit(self, unit: float | None) -> None:
        self._unit = unit
        self._varies = unit is not None  # as far as it is known

    @property
    def lasting_unit(self) -> float | None:
        """The unit, where a run that estimates another one continues with other bits; None where
        weights are 1, since the first backward gives the same unit then."""
        return self._unit if self._varies else None

    @property
    def _divisor(self) -> float:
        return (self._unit or 1.0) / self._scale.value


_SHARE_GRAIN = 1 << 20


def _rounded(seed: float, dtype: torch.dtype) -> float:
    """Return the number nearest to `seed` that the 16-bit `dtype` can hold; 0 stays 0."""
    limits = torch.finfo(dtype)
    within = min(max(seed, limits.tiny), limits.max) if seed else 0.0
    return float(torch.tensor(within, dtype=dtype))
