"""Weights gradients so that their sum is the gradient of the mean over all items of all workers.

Each rank's loss is a mean over `weight` items. Its gradient is multiplied by weight / unit and
summed across micro-batches and ranks. The weights are summed too, and a single division in the
update turns the sum into the mean. The factor has two parts:

    weight / unit  =  seed         passed to autograd: seen by hooks and autograd.Functions
                      x rest       applied to each gradient when it enters its bucket

The seed is the loss's share of the mean that a single process would compute: its rows divided by
the rows of the global batch. Nonlinear code in the graph (a hook that clamps) therefore sees
gradients of the same size as in a single process. With one worker and an undivided batch the seed
is 1, as in `loss.backward()`. The seed of a sum (reduction="sum" or "ddp") is always 1.

The unit is the last step's total weight divided by its total share. As long as weights are
proportional to rows and batches have the same size, the rest is therefore 1 and costs nothing. It
is not 1 if weights count tokens, if the batch size changes, or if the seed of a 16-bit loss is
rounded.

- If a step has only one backward pass on only one worker, the weight cancels out, so it is left out
  (`is_sole`). If another backward pass follows, the unit is set so that the first rest is 1.
- With --sync-batch-norm the seed is the entire factor. Gradients then cross between ranks inside
  the graph, so a rest that is applied afterwards would also multiply other ranks' gradients.
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
    """A loss's weight in its step.

    The loss's gradient is multiplied by `factor`, and `items` are added to the step's number of
    items. If losses are means, both equal the weight, and the sum is divided by the total number of
    items. If losses are sums, the factor is 1 and there is no division. `shown` is the number of
    items that messages print: the number of rows if the loss is a mean over all elements of its
    rows.
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
    """Return the weight of a loss of `batch`.

    A stand-in batch always has weight 0. A weight on a GPU stays there, as a 0-dim tensor.

    Args:
        batch: The batch of the loss, or None.
        weight: Number of items that the loss is a mean over. If None, it is read from `terms`. If
            `terms` has no number, it is the number of samples in the batch, or 1 without a batch.
        summed: Whether the loss is a sum over the items instead of a mean.
        terms: The terms found in the loss's graph.
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
    """Return the loss's share of the loss that a single process would compute.

    The share is the seed of the loss's backward pass. For a mean, it is the fraction of the global
    batch's rows that are in `batch`. Without a batch, all `replicas` are assumed to have equal
    parts. For a sum, it is 1. With islands (`groups` of ranks that step separately), each group
    averages over its own part of the global batch.
    """
    if batch is not None and batch.samples == 0:
        return 0.0
    if summed:
        return 1.0
    if batch is None or not batch.total:
        return 1.0 / replicas
    return batch.samples * groups / batch.total


def divisor_of(reduction: str, *, weighted: bool, replicas: int) -> float:
    """Return the divisor of the sum of a step's losses.

    It is 1 for "sum" and the number of `replicas` for "ddp". It is 0 for "mean", because the real
    divisor, the number of items, is not known yet. Raises UsageError if `reduction` is unknown, or
    if a weight is combined with "sum" or "ddp".
    """
    if reduction not in REDUCTIONS:
        raise UsageError(f"reduction must be one of {', '.join(REDUCTIONS)}, not {reduction!r}.")
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
            raise UsageError(f"weight must be one number, not a tensor of shape {shape}.")
        # Reading it would synchronise with the GPU. The exchange reads it later, with the other
        # statistics.
        if given.device.type != "cpu":
            return given.detach().double().reshape(())
        given = given.item()
    if not 0 <= given < math.inf:
        raise UsageError(f"weight must be a number of 0 or more, not {given}.")
    return float(given)


class GradientWeighting:
    """Computes backward seeds and the gradients' divisor, identically on all ranks.

    Args:
        scale: The loss scale.
        group: The data-parallel ranks whose gradients are summed.
        parts: Aggregates the ranks' statistics.
        crosses: True if gradients cross between ranks inside the graph (SyncBatchNorm).
        alone: True if one worker computes the entire step, and sums may be in any order.
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
        """Weight and share of this step's only backward pass so far, if its weight was left out."""
        self._had_several = False
        self._unit: float | None = None
        self._varies = False
        """True if weights are not all 1, so that a different unit would change the rounding."""

    def begin(self, weight: float | Tensor, share: float) -> None:
        """Estimate `unit` from every rank's first `weight` and `share`.

        The first call is collective. Later calls do nothing.
        """
        if self._unit is None:
            # Use fp64, so that the unit is bit-identical on all ranks.
            row = torch.as_tensor(weight, dtype=torch.float64, device=self._group.small_device)
            row = torch.stack([row.reshape(()), torch.full_like(row.reshape(()), share)])
            rows = self._group.read(self._group.gather_rows(row))
            total, count = self._parts.first_step(rows[:, 0].tolist())
            self.follow(total, count, self._parts.first_step(rows[:, 1].tolist())[0])

    def is_sole(self, weight: float | Tensor, share: float) -> bool:
        """Return whether this is probably the step's only backward pass, on the only worker."""
        # After a step with several backward passes, expect several again: `settle` would
        # synchronise.
        has_weight = isinstance(weight, Tensor) or weight > 0
        return self._alone and not self._had_several and has_weight and share > 0

    def settle(self) -> bool:
        """Prepare for another backward pass if the previous one left out its weight.

        Returns False if the weight was 0. The gradients must then be dropped, because they may be
        NaN. Reading a weight on a GPU synchronises, so no weights are left out in later steps.
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
        """Return the two factors for a backward pass of `loss`: the seed and the rest.

        The seed has the loss's shape and dtype, and is passed to autograd. The rest is applied to
        the gradients afterwards. The first call is collective.

        Args:
            loss: The loss, with one element.
            weight: The loss's weight.
            share: The loss's share of the loss that a single process would compute.
            is_sole: True to leave the weight out, because it cancels out.
        """
        self.begin(weight, share)
        # `divisor` uses these in place of the weight that was left out.
        self._sole = (weight, share) if is_sole else None
        whole = share * self._scale.value if is_sole else weight / self._divisor
        if self._crosses and isinstance(whole, Tensor):
            # Compute in fp64 on the device, because reading `whole` would synchronise.
            narrow = whole.to(loss.dtype)
            rest = torch.where(narrow == 0, 1.0, whole / narrow) if loss.dtype in NARROW else 1.0
            return narrow.view_as(loss), rest
        seed = float(whole) if self._crosses else share * self._scale.value
        if loss.dtype in NARROW:
            # Round to the nearest 16-bit number, but never to 0 or infinity. A seed of 0 stays 0.
            limits = torch.finfo(loss.dtype)
            within = min(max(seed, limits.tiny), limits.max) if seed else 0.0
            seed = float(torch.tensor(within, dtype=loss.dtype))
        rest = whole / seed if seed else 1.0
        if not isinstance(rest, Tensor) and math.isclose(rest, 1.0, rel_tol=1e-12):
            rest = 1.0  # a difference this small is rounding: skip the multiplication
        # Use `full` on the device, because a copy from the host would synchronise.
        return torch.full(loss.shape, seed, dtype=loss.dtype, device=loss.device), rest

    def seed_of(self, total: float, share: float, *, is_sole: bool) -> float:
        """Return the seed for a term whose weight, summed over all ranks, is `total`.

        `share` and `is_sole` describe this rank's loss. Call this after `seed`.
        """
        return share * self._scale.value if is_sole else total / self._divisor

    @property
    def knows_divisor(self) -> bool:
        """True if `divisor` doesn't depend on the weight, because the step has a single loss."""
        return self._sole is not None

    def divisor(self, total_weight: float) -> float:
        """Return the divisor that turns summed gradients into the mean gradient."""
        if self._sole is not None:
            return self._sole[1] * self._scale.value
        return total_weight / self._divisor

    def clear(self, *, several: bool | None = None) -> None:
        """Reset for the next step.

        `several` is True if the completed step had several backward passes.
        """
        self._sole = None
        self._had_several = self._had_several if several is None else several

    def follow(self, total_weight: float, count: int, shares: float) -> None:
        """Compute `unit` from a step's total weight and `shares`, the sum of its shares.

        `count` is the step's number of backward passes.
        """
        self._varies = total_weight != count
        # Round, because exact mode needs the same unit for every order of adding the shares.
        shares = round(shares * _SHARE_GRAIN) / _SHARE_GRAIN
        self._unit = total_weight / shares if total_weight > 0 and shares > 0 else 1.0

    def follow_step(self, totals: StepTotals) -> None:
        """Compute `unit` from the totals of a step with a nonzero weight."""
        # Each sum has a factor of 1, so a step's factors add up to its number of backward passes.
        factors = totals.backwards if totals.divisor else totals.weight
        self.follow(factors, totals.backwards, totals.shares)

    @property
    def unit(self) -> float | None:
        """The weight of a loss whose seed is 1, or None before the first backward pass."""
        return self._unit

    @unit.setter
    def unit(self, unit: float | None) -> None:
        self._unit = unit
        self._varies = unit is not None  # assume it does: a checkpoint does not say

    @property
    def lasting_unit(self) -> float | None:
        """The unit that a checkpoint must contain for a bit-identical resume.

        It is None if all weights are 1, because the first backward pass after the resume then
        computes the same unit.
        """
        return self._unit if self._varies else None

    @property
    def _divisor(self) -> float:
        return (self._unit or 1.0) / self._scale.value


_SHARE_GRAIN = 1 << 20
"""Shares are rounded to multiples of 1 / _SHARE_GRAIN."""
