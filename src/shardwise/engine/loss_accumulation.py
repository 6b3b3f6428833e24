"""Records the weight and loss of each of this rank's backward passes since the last step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from shardwise.engine.gradient_weighting import LossWeight
from shardwise.engine.loss_terms import FURTHER, UNKNOWN, LossTerms
from shardwise.engine.step_statistics import Number
from shardwise.errors import UsageError
from shardwise.world.current_batch import Batch

_PLACES = 1 << 20
"""An upper bound on the number of micro-batches per batch."""


@dataclass(frozen=True)
class LossTerm:
    """A loss's contribution to its step.

    batch    the batch that the loss was computed from
    weight   the loss's weight in the mean
    given    True if the user passed the weight
    of       index of the earlier backward pass of this step that counted the same items, or None
    terms    the terms found in the loss's autograd graph
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
        """True if an earlier backward pass of this step has already counted this loss's items."""
        return self.of is not None


@dataclass
class LossAccumulation:
    """This rank's backward passes since the last step.

    Four lists have one entry per backward pass: its number of items (`weights`), the number of
    items that messages print (`shown`), its loss times its factor (`losses`), and its sample
    indices (`indices`). Values on a GPU stay there.
    """

    weights: list[Number] = field(default_factory=list)
    shown: list[Number] = field(default_factory=list)
    losses: list[Number] = field(default_factory=list)
    indices: list[tuple[int, ...]] = field(default_factory=list)
    shares: float = 0.0
    """Sum of the seeds of these backward passes; see gradient_weighting."""
    divisor: float = 0.0
    """Divisor of the summed losses; 0 for means, which are divided by their number of items."""
    is_said: bool = False
    """True once the user or a loss's graph has determined whether losses are means or sums."""
    stepping: bool = False
    """True once the step has started, even if it then failed."""
    checks_weights: bool = True
    """Whether to compare the user's weights with the number of items in the graphs."""
    _terms: list[LossTerm] = field(default_factory=list)
    _mixes: dict[int, Number] = field(default_factory=dict)
    """Maps each backward pass that counted items to a number that is the same on all ranks if its
    weight fits all losses of these items."""
    needs_sole_loss: bool = False
    """True if a loss mixes sums and means, so that no weight fits if there are other losses."""

    def clear(self) -> None:
        """Reset for the next step."""
        self.weights, self.shown, self.losses, self.indices = [], [], [], []
        self._terms, self._mixes = [], {}
        self.shares, self.divisor, self.stepping = 0.0, 0.0, False
        self.is_said = self.needs_sole_loss = False

    @property
    def backwards(self) -> int:
        """Number of backward passes since the last step."""
        return len(self.weights)

    @property
    def weighted_backwards(self) -> int:
        """Number of backward passes since the last step, except those known to have weight 0."""
        return sum(isinstance(weight, Tensor) or weight != 0 for weight in self.weights)

    @property
    def tokens(self) -> tuple[int, int]:
        """Number of tokens and of positions in this step's batches, totalled over all ranks."""
        # Several losses may have the same batch.
        batches = {id(term.batch): term.batch for term in self._terms if term.batch is not None}
        known = batches.values()
        return sum(each.tokens for each in known), sum(each.positions for each in known)

    def divisor_from(self, terms: LossTerms) -> float:
        """Return the step's divisor for a loss without a reduction.

        If no earlier loss has set it, `terms` decides: 1 for a sum, 0 for a mean.
        """
        return float(terms.is_sum) if self._is_open else self.divisor

    @property
    def _is_open(self) -> bool:
        """True if the step's next loss may still be either a mean or a sum."""
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
        """Return how a loss of `batch` contributes to the step.

        Losses of the same items are added. Losses of different items are averaged, weighted by
        their number of items. By default, losses of the same batch are assumed to be of the same
        items, as in plain PyTorch. If the user passed a weight for one of them, `same_items` must
        say whether that is so.

        Args:
            batch: The batch of the loss, or None.
            weight: The loss's weight.
            given: True if the user passed the weight.
            divisor: Number by which the sum of losses is divided; 0 for means.
            same_items: Whether an earlier loss of this step has counted these items, or None to
                infer it.
            terms: The terms found in the loss's graph.

        Raises:
            UsageError: It is unclear whether the losses are of the same items, or an earlier loss
                of the step has a different `divisor`.
        """
        # Skip losses with weight 0: they fit sums as well as means, so a worker without items need
        # not know which of the two the other workers use.
        if not given or _is_counted(weight.items):
            self._check_reduction(divisor)
        of = self._counted_by(batch, weight, given, same_items)
        if of is not None and not given and not divisor:
            # The items have been counted with the first loss's weight; don't count them again.
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
        """Record a backward pass of `loss`.

        Args:
            loss: The loss, a scalar.
            term: The loss's contribution, from `term()`.
            divisor: Number by which the sum of losses is divided; 0 for means.
            share: The fraction of the single-process loss that this loss accounts for.
            compares: If True, also record whether the number of items in the loss's graph matches
                its weight.
        """
        number = self.backwards
        self.shares += 0.0 if term.is_repeated else share
        # As in `term`, a weight of 0 does not show whether the loss is a mean or a sum.
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
            # The micro-batches were averaged, which is wrong for sums. Add two different numbers,
            # so that all ranks raise at the exchange even if only this rank has the loss.
            self._mixes.update({-1: 0.0, -2: 1.0})
        for place, (terms, weight) in enumerate(term.parts or [(term.terms, term.weight.factor)]):
            if not isinstance(weight, Tensor) and weight == 0:
                continue
            self.needs_sole_loss |= not term.given and terms.mixes_sums(summed=divisor > 0)
            if divisor > 0:
                continue
            if terms == UNKNOWN:
                continue  # for example on pipeline stages without the loss
            # For the first loss of these items, the ratio of its number of items to its weight must
            # be equal on all ranks.
            if term.of is None:
                self._mixes[number * _PLACES + place] = terms.mix(weight)
            elif terms.terms:
                first = self._terms[term.of]
                # Match losses by their position within a batch, because ranks may have different
                # numbers of batches: the n-th loss of every batch must have the same ratio.
                ordinal = sum(each.of == term.of for each in self._terms)
                key = term.of * _PLACES + min(place, max(len(first.parts) - 1, 0))
                mix = terms.mix(weight)
                # A batch without items says nothing about the ratio.
                if term.given and not first.parts and not first.weight.factor:
                    continue
                # If the user passed the weight, other batches may lack this loss: only compare its
                # ratio with that of the batch's first loss.
                if term.given and not first.parts:
                    mix = mix - first.terms.mix(first.weight.factor)
                self._mixes[key] = self._mixes.get(key, 0.0) + (ordinal + 1) * mix

    @property
    def mixes(self) -> int:
        """Number of values that `mix_range` compares."""
        return len(self._mixes)

    def mix_range(self) -> tuple[Number, Number]:
        """Return the minimum and maximum of this rank's values in `_mixes`.

        If the weights are right for all losses, the values of all ranks are equal, so the minimum
        equals the maximum. Returns (inf, -inf) if there are no values.
        """
        mixes = list(self._mixes.values())
        # Compare values on a GPU there, because reading them would synchronise.
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
        """Describe each batch's losses and weight. Synchronises if a weight is on a GPU.

        Losses that this rank does not know, as on most stages of a pipeline, are left out.
        """
        words = []
        for number, term in enumerate(self._terms):
            if term.is_repeated:
                continue
            further = [each.terms.describe() for each in self._terms if each.of == number]
            ending = "".join(f"{FURTHER} {each}" for each in further)
            words += [
                f"{terms.describe()}, weighed by {float(weight):,.10g}{ending}"
                for terms, weight in (term.parts or [(term.terms, term.weight.factor)])
                if terms != UNKNOWN
            ]
        return words

    @property
    def kinds(self) -> tuple[str, ...]:
        """The distinct sources, such as "cross_entropy", of the means in the step's losses.

        Only losses whose weight was read from their graph are included.
        """
        # Skip losses with a weight from the user, who has already decided how to weight them.
        mains = [t.terms.main for t in self._terms if not (t.given or t.is_repeated)]
        return tuple(dict.fromkeys(main.source for main in mains if main is not None))

    @property
    def first_terms(self) -> LossTerms | None:
        """Terms of the step's first loss, or None if its weight was not read from its graph."""
        first = self._terms[0] if self._terms else None
        return None if first is None or first.given or self.divisor else first.terms

    @property
    def has_given_weights(self) -> bool:
        """True if the user passed a weight for every loss of the step."""
        return all(term.given for term in self._terms)

    def _check_reduction(self, divisor: float) -> None:
        """Raise UsageError if an earlier loss of the step has a different divisor."""
        if not self._is_open and divisor != self.divisor:
            raise UsageError(
                "The losses of one step have different values of `reduction`, so they would be "
                "divided by different numbers. Use the same `reduction` for all of them, or add "
                "them up and call engine.backward once."
            )

    def _counted_by(
        self, batch: Batch | None, weight: LossWeight, given: bool, same_items: bool | None
    ) -> int | None:
        """Return the index of the earlier backward pass that counted a loss's items, or None.

        Raises UsageError in two cases: a weight was `given` for one of two losses of a batch
        without `same_items` (each may be a mean over only part of the batch), or two means over the
        same items have different numbers of items.
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
    """Return False only if `items` is known to be 0.

    A value on a GPU is assumed to be nonzero, because reading it would synchronise.
    """
    return isinstance(items, Tensor) or items != 0


def _weighted(loss: Tensor, weight: Number) -> Number:
    """Return `loss * weight`, or 0 if the weight is 0 (even if the loss is NaN)."""
    if not isinstance(weight, Tensor) and weight == 0:
        return 0.0
    if loss.device.type == "cpu" and not isinstance(weight, Tensor):
        return weight * loss.item()
    value = loss.detach().double()
    if isinstance(weight, Tensor):
        value = value.to(weight.device)
        return torch.where(weight == 0, 0.0, value * weight)
    return weight * value
