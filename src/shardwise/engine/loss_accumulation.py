"""The weights and losses of a rank's backwards between two steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from shardwise.engine.gradient_weighting import LossWeight
from shardwise.engine.loss_terms import UNKNOWN, LossTerms
from shardwise.engine.step_statistics import Number
from shardwise.errors import UsageError
from shardwise.world.current_batch import Batch

_PLACES = 1 << 20
"""More than the number of micro-batches of any batch."""


@dataclass(frozen=True)
class LossTerm:
    """The share of one loss in its step.

    batch    the batch it was computed from
    weight   how much it counts
    given    True if the user passed the weight
    of       number of the earlier backward of this step that counted the same items, or None
    terms    what its graph shows
    parts    terms and weight of each micro-batch, if the loss is a mean over several
    """

    batch: Batch | None
    weight: LossWeight
    given: bool
    of: int | None
    terms: LossTerms = UNKNOWN
    parts: Sequence[tuple[LossTerms, Number]] = ()

    @property
    def is_repeated(self) -> bool:
        """True if an earlier backward of the step has counted its items."""
        return self.of is not None


@dataclass
class LossAccumulation:
    """This rank's backwards since the last step (gradient accumulation; no `no_sync` is needed).

    For each backward, `weights` has its number of items, `shown` that number as users see it,
    `losses` its loss x factor, and `indices` its samples. Numbers on a GPU stay there.
    """

    weights: list[Number] = field(default_factory=list)
    shown: list[Number] = field(default_factory=list)
    losses: list[Number] = field(default_factory=list)
    indices: list[tuple[int, ...]] = field(default_factory=list)
    shares: float = 0.0
    """Sum of the seeds of these backwards; see gradient_weighting."""
    divisor: float = 0.0
    """Divisor of the added losses; 0 for means, which are divided by their items."""
    is_said: bool = False
    """True if the user has said, or a graph shows, whether losses are means or sums."""
    stepping: bool = False
    """True once the step has begun, and also if it failed."""
    checks_weights: bool = True
    """Whether weights from the user are compared with what graphs show."""
    _terms: list[LossTerm] = field(default_factory=list)
    _mixes: dict[int, Number] = field(default_factory=dict)
    """For each backward that counted items: a number that is the same on all ranks if its weight
    fits all losses of these items."""
    needs_sole_loss: bool = False
    """True if a loss has sums and means, so that no weight is right together with other losses."""

    def clear(self) -> None:
        """Reset for the next step."""
        self.weights, self.shown, self.losses, self.indices = [], [], [], []
        self._terms, self._mixes = [], {}
        self.shares, self.divisor, self.stepping = 0.0, 0.0, False
        self.is_said = self.needs_sole_loss = False

    @property
    def backwards(self) -> int:
        """Number of backwards since the last step."""
        return len(self.weights)

    @property
    def weighted_backwards(self) -> int:
        """Number of backwards whose weight is not known to be 0."""
        return sum(isinstance(weight, Tensor) or weight != 0 for weight in self.weights)

    def divisor_from(self, terms: LossTerms) -> float:
        """Return the divisor of a loss by its `terms` alone: 1 for a sum, 0 for a mean."""
        return float(terms.is_sum) if self._is_open else self.divisor

    @property
    def _is_open(self) -> bool:
        """True if the next loss may be a mean or a sum: those so far weigh nothing."""
        return not self.is_said and not self.weighted_backwards

    def term(
        self,
        batch: Batch | None,
        weight: LossWeight,
        *,
        given: bool,
        divisor: float,
        same_items: bool | None = None,
        terms: LossTerms = UNKNOWN,
    ) -> LossTerm:
        """Return how a loss of `batch` counts. `given`: the user passed its `weight`.

        Losses of the same items are added; losses of different items are averaged by their numbers.
        By default, losses of one batch are of the same items, as in plain PyTorch, if the weight is
        the size of the batch. `same_items` overrides this.

        Raises UsageError if that is ambiguous, and for losses with another `divisor`.
        """
        # A loss with weight 0 fits sums as well as means: a worker without items need not know.
        if not given or _is_counted(weight.items):
            self._check_reduction(divisor)
        of = self._counted_by(batch, weight, given, same_items)
        if of is not None and not given and not divisor:
            # The items were counted with the first loss's weight, and are not counted again.
            weight = replace(weight, factor=self._terms[of].weight.factor)
        return LossTerm(batch, weight, given, of, terms)

    def add(
        self,
        loss: Tensor,
        term: LossTerm,
        divisor: float,
        share: float = 1.0,
        *,
        compares: bool = True,
    ) -> None:
        """Count one backward of `loss`, which is this `share` of the loss of a single process.

        If `compares`, record whether its terms fit its weight.
        """
        number = self.backwards
        self.shares += 0.0 if term.is_repeated else share
        # A weight of 0 says nothing about the kind of loss, as above.
        is_said = (
            _is_counted(term.weight.items) if term.given else bool(term.terms.terms or term.parts)
        )
        if self._is_open or is_said or not compares:
            self.divisor = divisor
        self.indices.append(() if term.batch is None else term.batch.indices)
        # A repeated term adds its gradient, but its items are already counted.
        self.weights.append(0.0 if term.is_repeated else term.weight.items)
        self.shown.append(0.0 if term.is_repeated else term.weight.shown)
        self.losses.append(_weighted(loss, term.weight.factor))
        self._terms.append(term)
        self.is_said |= not compares or is_said
        if not compares or (term.given and not self.checks_weights):
            return
        cut = sum(_is_counted(weight) for _, weight in term.parts) > 1
        if cut and not term.given and not divisor and any(t.has_sum for t, _ in term.parts):
            # The micro-batches were averaged, which is wrong for sums. Two different numbers make
            # all ranks raise at the exchange, although maybe only this one has the loss.
            self._mixes.update({-1: 0.0, -2: 1.0})
        for place, (terms, weight) in enumerate(term.parts or [(term.terms, term.weight.factor)]):
            if not isinstance(weight, Tensor) and weight == 0:
                continue
            self.needs_sole_loss |= not term.given and terms.mixes_sums(summed=divisor > 0)
            if divisor > 0:
                continue
            if terms == UNKNOWN:
                continue  # for example on pipeline stages without the loss
            # The first loss of the items: the ratio of its terms to its weight must be equal on all
            # ranks.
            if term.of is None:
                self._mixes[number * _PLACES + place] = terms.mix(weight)
            elif terms.terms:
                first = self._terms[term.of]
                # Number the losses of each batch, because ranks may have different numbers of
                # batches: the n-th loss of every batch must have the same ratio.
                ordinal = sum(each.of == term.of for each in self._terms)
                key = term.of * _PLACES + min(place, max(len(first.parts) - 1, 0))
                self._mixes[key] = self._mixes.get(key, 0.0) + (ordinal + 1) * terms.mix(weight)

    def mix_range(self) -> tuple[Number, Number]:
        """Return the lowest and highest of this rank's numbers in `_mixes`.

        They are equal on all ranks if the weights fit all losses. Without any: infinity and minus
        infinity.
        """
        mixes = list(self._mixes.values())
        # Numbers on a GPU are compared there, because reading them would wait for it.
        far = [mix for mix in mixes if isinstance(mix, Tensor) and mix.device.type != "cpu"]
        if not far:
            numbers = [float(mix) for mix in mixes if math.isfinite(mix)]
            return min(numbers, default=math.inf), max(numbers, default=-math.inf)
        device = far[0].device
        row = torch.stack(
            [torch.as_tensor(mix, dtype=torch.float64, device=device).reshape(()) for mix in mixes]
        )
        known = row.isfinite()
        return (
            torch.where(known, row, math.inf).min(),
            torch.where(known, row, -math.inf).max(),
        )

    def describe(self) -> list[str]:
        """Describe each loss of the step and its weight. Waits for a GPU that has the weight."""
        return [
            f"{terms.describe()}, weighed by {float(weight):,.10g}"
            for term in self._terms
            for terms, weight in (term.parts or [(term.terms, term.weight.factor)])
        ]

    @property
    def kinds(self) -> tuple[str, ...]:
        """Sources of the losses of this step whose weight was read from their graph."""
        # A user who passes a weight has already decided how losses are weighted.
        mains = [t.terms.main for t in self._terms if not (t.given or t.is_repeated)]
        return tuple(dict.fromkeys(main.source for main in mains if main is not None))

    @property
    def first_terms(self) -> LossTerms | None:
        """Terms of the step's first loss, if its weight was read from its graph; else None."""
        first = self._terms[0] if self._terms else None
        return None if first is None or first.given or self.divisor else first.terms

    @property
    def has_given_weights(self) -> bool:
        """True if the user has passed the weight of each loss of the step."""
        return all(term.given for term in self._terms)

    def _check_reduction(self, divisor: float) -> None:
        """Raise UsageError if earlier losses of the step have another divisor."""
        if not self._is_open and divisor != self.divisor:
            raise UsageError(
                "Losses of one step have a different `reduction` (sums with means, or both kinds "
                'of sums, "sum" and "ddp"), and are divided by different numbers: add them to one '
                "loss before engine.backward, or use the same reduction for all."
            )

    def _counted_by(
        self, batch: Batch | None, weight: LossWeight, given: bool, same_items: bool | None
    ) -> int | None:
        """Return the number of the earlier backward of this step that counted the items of a loss.

        Raises UsageError if a weight was `given` for one of two losses of a batch, because each may
        be a mean over a part of it, and for means over different numbers of the same items.
        """
        if same_items is False or (not isinstance(weight.items, Tensor) and weight.items == 0):
            return None
        counting = [n for n, term in enumerate(self._terms) if not term.is_repeated]
        earlier = [n for n in counting if batch is not None and self._terms[n].batch is batch]
        if same_items is None:
            if earlier and (given or self._terms[earlier[-1]].given):
                raise UsageError(
                    "A second engine.backward of one batch with weight=: write same_items=True if "
                    "this loss is a mean over the same items as the previous one (the two are "
                    "added), or same_items=False if over other items of the batch (they are "
                    "averaged by weight). If you add the losses before a single engine.backward, "
                    "neither is needed."
                )
            return earlier[-1] if earlier else None
        if not self._terms:
            raise UsageError(
                "same_items=True is for a further loss of items that an earlier engine.backward "
                "of this step has counted, but this is the first one of the step: remove it here."
            )
        before = (earlier or counting)[-1]
        items = self._terms[before].weight.items
        if given and not self.divisor and float(weight.items) != float(items):
            raise UsageError(
                f"same_items=True, but this loss is a mean over {float(weight.items):g} items and "
                f"the previous one over {float(items):g}. Means over different numbers of items "
                "cannot be added: divide both by totals over all workers (world.sum) yourself, "
                'and write engine.backward(loss, reduction="sum").'
            )
        return before


def _is_counted(items: Number) -> bool:
    """Return whether `items` are not known to be 0. A number on a GPU is not read."""
    return isinstance(items, Tensor) or items != 0


def _weighted(loss: Tensor, weight: Number) -> Number:
    """Return `loss` x `weight`; 0 for weight 0, even if the loss is NaN."""
    if not isinstance(weight, Tensor) and weight == 0:
        return 0.0
    value = loss.detach().double()
    if isinstance(weight, Tensor):
        value = value.to(weight.device)
        return torch.where(weight == 0, 0.0, value * weight)
    return weight * (value.item() if value.device.type == "cpu" else value)
