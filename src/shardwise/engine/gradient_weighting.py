"""Weights gradients, so that their sum is that of the mean over all items of all workers.

Each rank's loss is a mean over `weight` items. Backward is seeded with weight / divisor, so that
gradients add up to weighted sums over micro-batches and ranks; the total weight travels beside
them, and one division in the update makes them the mean. The divisor is the last step's
mean weight times a power of two near the number of its backwards, over the loss scale: seeds add
up to about 1, so that 16-bit gradients stay in range, and where all weights are one number seeds
are powers of two, which scale every gradient exactly in every dtype.

A loss that is a sum over items is seeded with 1 / divisor instead, and the sums of all ranks are
added: what is divided then is only what the seeds have scaled. With reduction="ddp" the same sum is
divided by the number of replicas, as DistributedDataParallel does.

A 16-bit loss takes only a 16-bit seed, which would round the weight. It gets the power of two near
its seed, and each gradient is multiplied by the rest, in fp32, on its way to its bucket.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.collectives import Collectives
from shardwise.current_batch import Batch
from shardwise.engine.loss_terms import UNKNOWN, LossTerms
from shardwise.engine.step_statistics import Aggregation, StepTotals
from shardwise.errors import UsageError
from shardwise.model.loss_scale import LossScale
from shardwise.model.precision import NARROW

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
            return given.detach().reshape(())
        given = given.item()
    if not 0 <= given < math.inf:
        raise UsageError(f"weight takes a number of 0 or more, not {given}.")
    return float(given)


class GradientWeighting:
    """Computes the seeds of backward and the divisor of the gradients, alike on all ranks."""

    def __init__(self, scale: LossScale, group: Collectives, parts: Aggregation) -> None:
        self._scale = scale
        self._group = group
        self._parts = parts
        self._unit: float | None = None
        self._varies = False
        """Whether weights are others than 1, so that units differ by no powers of two alone."""

    def begin(self, weight: float | Tensor) -> None:
        """Estimate the weight of a step from each rank's first `weight`; the first call is
        collective."""
        if self._unit is None:
            row = torch.as_tensor(weight, dtype=torch.float64, device=self._group.small_device)
            rows = self._group.read(self._group.gather_rows(row.reshape(1)))
            weights = rows.flatten().tolist()
            self.follow(*self._parts.first_step(weights))

    def seed(self, loss: Tensor, weight: float | Tensor) -> tuple[Tensor, float | Tensor]:
        """The seed of a backward of `loss`, in its dtype, and the factor by which its gradients are
        still to be multiplied. The first call is collective."""
        self.begin(weight)
        exact = torch.as_tensor(weight, dtype=torch.float64) / self._divisor
        narrow = loss.dtype in NARROW
        seed = _power_of_two(exact, loss.dtype) if narrow else exact
        rest = exact / seed if narrow else 1.0
        if isinstance(weight, Tensor):
            return seed.to(loss.device, loss.dtype).view_as(loss), rest
        # Filled in there: a copy to a GPU would wait for it.
        filled = torch.full((), seed.item(), dtype=loss.dtype, device=loss.device)
        return filled.view_as(loss), float(rest)

    def divisor(self, total_weight: float) -> float:
        """The number that turns summed gradients into their mean, by division."""
        return total_weight / self._divisor

    def follow(self, total_weight: float, count: int) -> None:
        """Take the total weight of a step with `count` backwards as an estimate of the next."""
        self._varies = total_weight != count
        if not (total_weight > 0 and count):
            self._unit = 1.0
        else:
            self._unit = math.ldexp(total_weight / count, round(math.log2(count)))

    def follow_step(self, totals: StepTotals) -> None:
        """The same of what all ranks know of a step that weighs something."""
        factors = totals.backwards if totals.divisor else totals.weight
        self.follow(factors, totals.backwards)

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
        """The unit, where a run that estimates another one goes on with other bits; None where
        weights are 1, since any unit is a power of two then."""
        return self._unit if self._varies else None

    @property
    def _divisor(self) -> float:
        return (self._unit or 1.0) / self._scale.value


def _power_of_two(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """The power of two near `exact`, in fp64, that the 16-bit `dtype` can hold; 1 for 0."""
    limits = torch.finfo(dtype)
    within = torch.where(exact > 0, exact, 1.0).log2().round()
    lowest, highest = math.log2(limits.tiny), math.floor(math.log2(limits.max))
    return torch.exp2(within.clamp(lowest, highest))
