"""Weights gradients, so that their sum is the gradient of the mean over all items of all workers.

Each rank's loss is a mean over `weight` items. Its gradient is multiplied by weight / unit, and
added over micro-batches and ranks. The weights are added too, and one division in the update turns
the sum into the mean. The factor has two parts:

    weight / unit  =  seed         of autograd: seen by hooks and autograd.Functions in the graph
                      x rest       applied to each gradient when it enters its bucket

The seed is the loss's share of the mean that a single process would compute: its rows / the rows
of the total batch. Code in the graph that is not linear (a hook that clamps) therefore sees
gradients of the same size as in a single process. With one worker and a whole batch the seed is 1,
as in `loss.backward()`. A loss that is a sum (reduction="sum" or "ddp") always has a seed of 1.

The unit is the total weight of the last step / its total of shares. As long as weights are
proportional to rows and batches have the same size, the rest is then 1 and costs nothing. It is
not 1 for weights such as tokens, around a short batch, and if a 16-bit loss rounds its seed.

- The weight of the only backward of a step on the only worker cancels out, so it is left out
  (`is_sole`). If another backward follows, the unit is set so that the first rest is 1.
- With --sync-batch-norm the seed is the whole factor. Gradients cross between ranks inside the
  graph there, so a rest that is applied afterwards would also multiply other ranks' gradients.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.comm import Collectives
from shardwise.engine.loss_terms import UNKNOWN, LossTerms
from shardwise.engine.step_statistics import Aggregation
from shardwise.errors import UsageError
from shardwise.model.loss_scale import LossScale
from shardwise.model.precision import NARROW
from shardwise.states.step_totals import StepTotals
from shardwise.world.current_batch import Batch

REDUCTIONS = ("mean", "sum", "ddp")


@dataclass(frozen=True, kw_only=True)
class LossWeight:
    """The weight of a loss in its step.

    Its gradient is multiplied by `factor`, and `items` are added to the items of the step. If
    losses are means, both are the weight, and the sum is divided by all items. If they are sums,
    the factor is 1 and nothing is divided. `shown` is the number of items as users see it: rows, if
    the loss is a mean over the elements of whole rows.
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
    """Return how much a loss of `batch` counts: a mean over `weight` items, or `summed` over them.

    Without `weight` the number of items is read from the `terms` of the loss, or it is the number
    of samples of the batch, or 1 without a batch. A stand-in always weighs 0. A number on a GPU
    stays there, as a 0-dim tensor.
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


def share_of(batch: Batch | None, *, summed: bool, replicas: int, groups: int = 1) -> float:
    """Return the share of a loss of `batch` in the loss of a single process: the seed of backward.

    A mean over some rows of a total batch counts by its rows. Without a batch, the `replicas` are
    assumed to have equal parts. A sum counts whole. The total batch has the rows of all `groups`
    that step separately, and each of them averages over its own part.
    """
    if batch is not None and batch.samples == 0:
        return 0.0
    if summed:
        return 1.0
    if batch is None or not batch.total:
        return 1.0 / replicas
    return batch.samples * groups / batch.total


def divisor_of(reduction: str, *, weighted: bool, replicas: int) -> float:
    """Return the divisor of the added losses of a step.

    It is 1 for "sum", the number of `replicas` for "ddp", and 0 for "mean", whose divisor is the
    number of items. Raises UsageError for another reduction, and for a weight with a reduction that
    takes none.
    """
    if reduction not in REDUCTIONS:
        raise UsageError(f"reduction is one of {', '.join(REDUCTIONS)}, not {reduction!r}.")
    if reduction == "mean":
        return 0.0
    if weighted:
        raise UsageError(
            f'weight= is the number of items of a mean, but reduction="{reduction}" adds this loss '
            "unweighted: remove one of the two."
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
        # Reading it would wait for the GPU. The exchange reads it later, with the other statistics.
        if given.device.type != "cpu":
            return given.detach().double().reshape(())
        given = given.item()
    if not 0 <= given < math.inf:
        raise UsageError(f"weight takes a number of 0 or more, not {given}.")
    return float(given)


class GradientWeighting:
    """Computes the seeds of backward and the divisor of the gradients, the same on all ranks.

    `crosses`: gradients cross between ranks inside the graph (SyncBatchNorm). `alone`: one worker
    computes the whole step, and sums may be in any order.
    """

    def __init__(
        self,
        scale: LossScale,
        group: Collectives,
        parts: Aggregation,
        *,
        crosses: bool = False,
        alone: bool = False,
    ) -> None:
        self._scale = scale
        self._group = group
        self._parts = parts
        self._crosses = crosses
        self._alone = alone
        self._sole: tuple[float | Tensor, float] | None = None
        """Weight and share of this step's only backward so far, if its weight was left out."""
        self._had_several = False
        self._unit: float | None = None
        self._varies = False
        """True if weights are not all 1, so that another unit would give other bits."""

    def begin(self, weight: float | Tensor, share: float) -> None:
        """Estimate the unit from the first backward's `weight` and `share` on each rank.

        The first call is collective; later ones do nothing.
        """
        if self._unit is None:
            # In fp64, so that the unit has the same bits on all ranks.
            row = torch.as_tensor(weight, dtype=torch.float64, device=self._group.small_device)
            row = torch.stack([row.reshape(()), torch.full_like(row.reshape(()), share)])
            rows = self._group.read(self._group.gather_rows(row))
            total, count = self._parts.first_step(rows[:, 0].tolist())
            self.follow(total, count, self._parts.first_step(rows[:, 1].tolist())[0])

    def is_sole(self, weight: float | Tensor, share: float) -> bool:
        """Return whether this backward is probably the only one of its step, on the only worker."""
        # After a step with several backwards, expect several again: `settle` would wait for a GPU.
        has_weight = isinstance(weight, Tensor) or weight > 0
        return self._alone and not self._had_several and has_weight and share > 0

    def settle(self) -> bool:
        """Prepare for another backward of the step, after one whose weight was left out.

        Returns False if the gradients so far must be dropped, because their weight is 0 and they
        may be NaN. Waits for a GPU that has this weight; later steps then do not leave it out.
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
        """Return the seed of a backward of `loss`, in its shape and dtype, and the rest.

        The rest is the factor to apply to its gradients afterwards. `share` is the loss's part of
        the loss of a single process. If it `is_sole`, its weight is left out. The first call is
        collective.
        """
        self.begin(weight, share)
        # `divisor` uses these in place of the weight that was left out.
        self._sole = (weight, share) if is_sole else None
        whole = share * self._scale.value if is_sole else weight / self._divisor
        if self._crosses and isinstance(whole, Tensor):
            # Computed in fp64 on the device, because reading `whole` would wait for the device.
            narrow = whole.to(loss.dtype)
            rest = torch.where(narrow == 0, 1.0, whole / narrow) if loss.dtype in NARROW else 1.0
            return narrow.view_as(loss), rest
        seed = float(whole) if self._crosses else share * self._scale.value
        if loss.dtype in NARROW:
            # Round to the nearest 16-bit number, but not to 0 or infinity; 0 stays 0.
            limits = torch.finfo(loss.dtype)
            within = min(max(seed, limits.tiny), limits.max) if seed else 0.0
            seed = float(torch.tensor(within, dtype=loss.dtype))
        rest = whole / seed if seed else 1.0
        if not isinstance(rest, Tensor) and math.isclose(rest, 1.0, rel_tol=1e-12):
            rest = 1.0  # a difference in the last bits is rounding: save the multiplication
        # `full` on the device, because a copy from the host would wait for it.
        filled = torch.full((), seed, dtype=loss.dtype, device=loss.device)
        return filled.view_as(loss), rest

    def divisor(self, total_weight: float) -> float:
        """Return the number to divide summed gradients by to get their mean."""
        if self._sole is not None:
            return self._sole[1] * self._scale.value
        return total_weight / self._divisor

    def clear(self, *, several: bool | None = None) -> None:
        """Reset for the next step. `several`: the completed one had more than one backward."""
        self._sole = None
        self._had_several = self._had_several if several is None else several

    def follow(self, total_weight: float, count: int, shares: float) -> None:
        """Set the unit from a step with `count` backwards, whose seeds add up to `shares`."""
        self._varies = total_weight != count
        # Rounded, because the exact mode needs the same unit however ranks have added the shares.
        shares = round(shares * _SHARE_GRAIN) / _SHARE_GRAIN
        self._unit = total_weight / shares if total_weight > 0 and shares > 0 else 1.0

    def follow_step(self, totals: StepTotals) -> None:
        """Set the unit from the totals of a step whose weight is not 0."""
        # The factor of each sum is 1, so the factors of a step add up to its number of backwards.
        factors = totals.backwards if totals.divisor else totals.weight
        self.follow(factors, totals.backwards, totals.shares)

    @property
    def unit(self) -> float | None:
        """The weight whose seed is 1; None before the first backward."""
        return self._unit

    @unit.setter
    def unit(self, unit: float | None) -> None:
        self._unit = unit
        self._varies = unit is not None  # unknown after a load, so assume it

    @property
    def lasting_unit(self) -> float | None:
        """The unit to save in a checkpoint, for a resume with the same bits.

        None if all weights are 1, because the first backward then gives the same unit.
        """
        return self._unit if self._varies else None

    @property
    def _divisor(self) -> float:
        return (self._unit or 1.0) / self._scale.value


_SHARE_GRAIN = 1 << 20
"""Shares are rounded to multiples of 1 / _SHARE_GRAIN."""
