"""Accumulates the weights and losses of a rank's backwards between one step and the next."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardwise.current_batch import Batch
from shardwise.engine.gradient_weighting import LossWeight
from shardwise.engine.step_statistics import Number
from shardwise.errors import UsageError


@dataclass(frozen=True)
class LossTerm:
    """How one loss counts in its step.

    `batch` is the one it comes from and `weight` how much it counts; `given` says whether the user
    gave the weight, `repeated` whether an earlier backward of the step has counted its items.
    """

    batch: Batch | None
    weight: LossWeight
    given: bool
    repeated: bool


@dataclass
class LossAccumulation:
    """This rank's backwards since the last step (gradient accumulation; no `no_sync` is needed).

    By backward: `weights` are the items that it counts, `losses` its loss x factor, `indices` its
    samples. Numbers stay on the device where that is a GPU.
    """

    weights: list[Number] = field(default_factory=list)
    losses: list[Number] = field(default_factory=list)
    indices: list[tuple[int, ...]] = field(default_factory=list)
    shares: float = 0.0
    """The seeds of these backwards, added up; see gradient_weighting."""
    divisor: float = 0.0
    """What the added losses are divided by; 0 where they are means: by the items."""
    stepping: bool = False
    """Whether the step has begun; it stays so where the step fails."""
    _terms: list[LossTerm] = field(default_factory=list)

    def clear(self) -> None:
        """Begin anew: the step was made, or its gradients are forgotten."""
        self.weights, self.losses, self.indices, self._terms = [], [], [], []
        self.shares, self.divisor, self.stepping = 0.0, 0.0, False

    @property
    def backwards(self) -> int:
        """How many backwards there were since the last step."""
        return len(self.weights)

    @property
    def weighted_backwards(self) -> int:
        """Backwards whose weight is not known to be 0."""
        return sum(isinstance(weight, Tensor) or weight != 0 for weight in self.weights)

    def term(
        self,
        batch: Batch | None,
        weight: LossWeight,
        *,
        given: bool,
        divisor: float,
        same_items: bool | None = None,
    ) -> LossTerm:
        """How a loss of `batch` will count; its `weight` was `given` by the user or not.

        Losses of the same items add up, those of other items are averaged by their numbers. Unless
        `same_items` says which it is, losses of one batch are of the same items, as in plain
        PyTorch, where the batch tells their number.

        Raises UsageError where that is ambiguous, and for losses with another `divisor`.
        """
        self._check_reduction(divisor)
        return LossTerm(batch, weight, given, self._is_repeated(batch, weight, given, same_items))

    def add(self, loss: Tensor, term: LossTerm, divisor: float, share: float = 1.0) -> None:
        """Count one backward of `loss`, which is that `share` of the loss of one process."""
        self.shares += 0.0 if term.repeated else share
        self.divisor = divisor
        self.indices.append(() if term.batch is None else term.batch.indices)
        self.weights.append(0.0 if term.repeated else term.weight.items)
        self.losses.append(_weighted(loss, term.weight.factor))
        self._terms.append(term)

    def _check_reduction(self, divisor: float) -> None:
        """Raise UsageError where earlier losses of the step were reduced in another way."""
        if self.backwards and divisor != self.divisor:
            raise UsageError(
                'One step has losses that are sums (reduction="sum" or "ddp") and losses that are '
                "means, or both kinds of sums, which are divided by different numbers: add them to "
                "one loss before engine.backward, or write all in one way."
            )

    def _is_repeated(
        self, batch: Batch | None, weight: LossWeight, given: bool, same_items: bool | None
    ) -> bool:
        """Whether an earlier backward of this step has counted the items of a loss.

        Raises UsageError where a weight was `given` for one of two losses of a batch, since they
        may as well be of parts of it, and for means over other numbers of the same items.
        """
        if same_items is False or (not isinstance(weight.items, Tensor) and weight.items == 0):
            return False
        earlier = [term for term in self._terms if batch is not None and term.batch is batch]
        if same_items is None:
            if earlier and (given or earlier[-1].given):
                raise UsageError(
                    "A second engine.backward of one batch with weight=: say whether this loss is "
                    "of the same items as the one before, so that the two add up "
                    "(same_items=True), or of other items of the batch, so that they are averaged "
                    "by weight (same_items=False). Adding the losses before one engine.backward "
                    "needs neither."
                )
            return bool(earlier)
        if not self._terms:
            raise UsageError(
                "same_items=True is for a further loss of items that an earlier engine.backward "
                "of this step has counted, and this is the first one: leave it out here."
            )
        before = (earlier or self._terms)[-1].weight.items
        if not self.divisor and float(weight.items) != float(before):
            raise UsageError(
                f"same_items=True, but this loss is a mean over {float(weight.items):g} items and "
                f"the one before over {float(before):g}. Means over other numbers cannot be added "
                "beside each other: divide both by totals over all workers (world.sum) yourself, "
                'and write engine.backward(loss, reduction="sum").'
            )
        return True


def _weighted(loss: Tensor, weight: Number) -> Number:
    """`loss` x `weight` (a factor); zero where that is, whatever the loss."""
    if not isinstance(weight, Tensor) and weight == 0:
        return 0.0
    value = loss.detach().double()
    if isinstance(weight, Tensor):
        value = value.to(weight.device)
        return torch.where(weight == 0, 0.0, value * weight)
    return weight * (value.item() if value.device.type == "cpu" else value)
