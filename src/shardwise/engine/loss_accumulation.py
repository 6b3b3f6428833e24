"""Accumulates the weights and losses of a rank's backwards between one step and the next."""

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
"""More than a batch has micro-batches."""


@dataclass(frozen=True)
class LossTerm:
    """How one loss counts in its step.

    `batch` is the one it comes from and `weight` how much it counts; `given` says whether the user
    gave the weight. `of` is the number of the earlier backward of the step that has counted its
    items, or None. `terms` is what its graph says, `parts` the same of each micro-batch with its
    weight, where the loss is a mean over several.
    """

    batch: Batch | None
    weight: LossWeight
    given: bool
    of: int | None
    terms: LossTerms = UNKNOWN
    parts: Sequence[tuple[LossTerms, Number]] = ()

    @property
    def repeated(self) -> bool:
        """Whether an earlier backward of the step has counted its items."""
        return self.of is not None


@dataclass
class LossAccumulation:
    """This rank's backwards since the last step (gradient accumulation; no `no_sync` is needed).

    By backward: `weights` are the items that it counts, `shown` what users see of them, `losses`
    its loss x factor, `indices` its samples. Numbers stay on the device where that is a GPU.
    """

    weights: list[Number] = field(default_factory=list)
    shown: list[Number] = field(default_factory=list)
    losses: list[Number] = field(default_factory=list)
    indices: list[tuple[int, ...]] = field(default_factory=list)
    shares: float = 0.0
    """The seeds of these backwards, added up; see gradient_weighting."""
    divisor: float = 0.0
    """What the added losses are divided by; 0 where they are means: by the items."""
    is_said: bool = False
    """Whether the user has said, or a graph shows, by what the losses are divided."""
    stepping: bool = False
    """Whether the step has begun; it stays so where the step fails."""
    checks_given: bool = True
    """Whether weights that the user gives are compared with what graphs say."""
    _terms: list[LossTerm] = field(default_factory=list)
    _mixes: dict[int, Number] = field(default_factory=dict)
    """By the backward that has counted the items, a number that all ranks have in common where its
    weight is right for all losses of the items."""
    needs_to_be_alone: bool = False
    """Whether a loss is both sums and means, so that no weight is right beside other backwards."""

    def clear(self) -> None:
        """Begin anew: the step was made, or its gradients are forgotten."""
        self.weights, self.shown, self.losses, self.indices = [], [], [], []
        self._terms, self._mixes = [], {}
        self.shares, self.divisor, self.stepping = 0.0, 0.0, False
        self.is_said = self.needs_to_be_alone = False

    @property
    def backwards(self) -> int:
        """How many backwards there were since the last step."""
        return len(self.weights)

    @property
    def weighted_backwards(self) -> int:
        """Backwards whose weight is not known to be 0."""
        return sum(isinstance(weight, Tensor) or weight != 0 for weight in self.weights)

    def divisor_read(self, terms: LossTerms) -> float:
        """What losses of the step are divided by, where only the `terms` of one say so."""
        return float(terms.is_sum) if self._is_open else self.divisor

    @property
    def _is_open(self) -> bool:
        """Whether the losses so far fit beside means as well as sums: they weigh nothing."""
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
        """How a loss of `batch` will count; its `weight` was `given` by the user or not.

        Losses of the same items add up, those of other items are averaged by their numbers. Unless
        `same_items` says which it is, losses of one batch are of the same items, as in plain
        PyTorch, where the batch tells their number.

        Raises UsageError where that is ambiguous, and for losses with another `divisor`.
        """
        if not given or _is_counted(weight.items):
            self._check_reduction(divisor)
        of = self._counted_by(batch, weight, given, same_items)
        if of is not None and not given and not divisor:
            # The items were counted with this weight, and are not counted again.
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
        """Count one backward of `loss`, which is that `share` of the loss of one process. Its terms
        are to fit its weight, where it `compares`."""
        number = self.backwards
        self.shares += 0.0 if term.repeated else share
        is_said = (
            _is_counted(term.weight.items) if term.given else bool(term.terms.terms or term.parts)
        )
        if self._is_open or is_said or not compares:
            self.divisor = divisor
        self.indices.append(() if term.batch is None else term.batch.indices)
        self.weights.append(0.0 if term.repeated else term.weight.items)
        self.shown.append(0.0 if term.repeated else term.weight.shown)
        self.losses.append(_weighted(loss, term.weight.factor))
        self._terms.append(term)
        self.is_said |= not compares or is_said
        if not compares or (term.given and not self.checks_given):
            return
        cut = sum(_is_counted(weight) for _, weight in term.parts) > 1
        if cut and not term.given and not divisor and any(t.has_sum for t, _ in term.parts):
            # The weights of micro-batches make a mean of them. Numbers that differ let all ranks
            # refuse the step, of which one rank alone may have the loss.
            self._mixes.update({-1: 0.0, -2: 1.0})
        for place, (terms, weight) in enumerate(term.parts or [(term.terms, term.weight.factor)]):
            if not isinstance(weight, Tensor) and weight == 0:
                continue
            self.needs_to_be_alone |= not term.given and terms.mixes_sums(summed=divisor > 0)
            if divisor > 0:
                continue
            if terms == UNKNOWN:
                continue  # such as on the stages of a pipeline that have no loss
            if term.of is None:
                self._mixes[number * _PLACES + place] = terms.mix(weight)
            elif terms.terms:
                first = self._terms[term.of]
                # Its place among the losses of its batch: ranks may have other numbers of batches.
                ordinal = sum(each.of == term.of for each in self._terms)
                key = term.of * _PLACES + min(place, max(len(first.parts) - 1, 0))
                self._mixes[key] = self._mixes.get(key, 0.0) + (ordinal + 1) * terms.mix(weight)

    def mix_range(self) -> tuple[Number, Number]:
        """The lowest and the highest of the numbers that are the same on all ranks where weights
        are right for all losses; without any, infinity and its negative."""
        mixes = list(self._mixes.values())
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
        """In words what each loss of the step is, and its weight. Waits for a GPU that has it."""
        return [
            f"{terms.describe()}, weighed by {float(weight):,.10g}"
            for term in self._terms
            for terms, weight in (term.parts or [(term.terms, term.weight.factor)])
        ]

    @property
    def kinds(self) -> tuple[str, ...]:
        """The operations of those losses of the step that are weighed by numbers of their own."""
        mains = [t.terms.main for t in self._terms if not (t.given or t.repeated)]
        return tuple(dict.fromkeys(main.source for main in mains if main is not None))

    @property
    def read_first(self) -> LossTerms | None:
        """What the graph of the step's first loss says, where that is its weight."""
        first = self._terms[0] if self._terms else None
        return None if first is None or first.given or self.divisor else first.terms

    @property
    def are_given(self) -> bool:
        """Whether the user has given the weight of each loss of the step."""
        return all(term.given for term in self._terms)

    def _check_reduction(self, divisor: float) -> None:
        """Raise UsageError where earlier losses of the step were reduced in another way."""
        if not self._is_open and divisor != self.divisor:
            raise UsageError(
                'One step has losses that are sums (reduction="sum" or "ddp") and losses that are '
                "means, or both kinds of sums, which are divided by different numbers: add them to "
                "one loss before engine.backward, or write all in one way."
            )

    def _counted_by(
        self, batch: Batch | None, weight: LossWeight, given: bool, same_items: bool | None
    ) -> int | None:
        """The number of the earlier backward of this step that has counted the items of a loss.

        Raises UsageError where a weight was `given` for one of two losses of a batch, since they
        may as well be of parts of it, and for means over other numbers of the same items.
        """
        if same_items is False or (not isinstance(weight.items, Tensor) and weight.items == 0):
            return None
        counting = [n for n, term in enumerate(self._terms) if not term.repeated]
        earlier = [n for n in counting if batch is not None and self._terms[n].batch is batch]
        if same_items is None:
            if earlier and (given or self._terms[earlier[-1]].given):
                raise UsageError(
                    "A second engine.backward of one batch with weight=: say whether this loss is "
                    "of the same items as the one before, so that the two add up "
                    "(same_items=True), or of other items of the batch, so that they are averaged "
                    "by weight (same_items=False). Adding the losses before one engine.backward "
                    "needs neither."
                )
            return earlier[-1] if earlier else None
        if not self._terms:
            raise UsageError(
                "same_items=True is for a further loss of items that an earlier engine.backward "
                "of this step has counted, and this is the first one: leave it out here."
            )
        before = (earlier or counting)[-1]
        items = self._terms[before].weight.items
        if given and not self.divisor and float(weight.items) != float(items):
            raise UsageError(
                f"same_items=True, but this loss is a mean over {float(weight.items):g} items and "
                f"the one before over {float(items):g}. Means over other numbers cannot be added "
                "beside each other: divide both by totals over all workers (world.sum) yourself, "
                'and write engine.backward(loss, reduction="sum").'
            )
        return before


def _is_counted(items: Number) -> bool:
    """Whether `items` are not known to be 0: a number on a GPU is not looked at."""
    return isinstance(items, Tensor) or items != 0


def _weighted(loss: Tensor, weight: Number) -> Number:
    """`loss` x `weight` (a factor); zero where that is, whatever the loss."""
    if not isinstance(weight, Tensor) and weight == 0:
        return 0.0
    value = loss.detach().double()
    if isinstance(weight, Tensor):
        value = value.to(weight.device)
        return torch.where(weight == 0, 0.0, value * weight)
    return weight * (value.item() if value.device.type == "cpu" else value)
