"""Combining the losses of a step: items that count once, averages, and refusals."""

from dataclasses import replace

import pytest
import torch

from shardwise.engine.gradient_weighting import LossWeight, divisor_of, weigh
from shardwise.engine.loss_accumulation import LossAccumulation
from shardwise.engine.loss_terms import LossTerms, Term
from shardwise.errors import UsageError
from shardwise.world.current_batch import Batch

LOSS = torch.tensor(2.0)
ONE, OTHER = Batch(samples=8), Batch(samples=8)


def count(accumulation, batch, weight=None, same_items=None, summed=False):
    """Add one more loss, and return whether its items had been counted."""
    share = weigh(batch, weight, summed=summed)
    term = accumulation.term(
        batch, share, given=weight is not None, divisor=float(summed), same_items=same_items
    )
    accumulation.add(LOSS, term, float(summed))
    return term.is_repeated


def test_losses_of_one_batch_count_it_once():
    accumulation = LossAccumulation()
    assert [count(accumulation, batch) for batch in (ONE, ONE, OTHER, ONE)] == [
        False,
        True,
        False,
        True,
    ]
    assert accumulation.weights == [8.0, 0.0, 8.0, 0.0]
    assert accumulation.losses == [16.0] * 4


def test_without_a_batch_each_loss_is_of_other_items():
    accumulation = LossAccumulation()
    assert not count(accumulation, None)
    assert not count(accumulation, None, weight=3)
    assert accumulation.weights == [1.0, 3.0]


@pytest.mark.parametrize("weights", [(8, 8), (8, None), (None, 8), (100, 50)])
def test_a_weight_for_a_second_loss_of_a_batch_says_of_which_items(weights):
    first, second = weights
    accumulation = LossAccumulation()
    count(accumulation, ONE, first)
    with pytest.raises(UsageError, match=r"same_items=True.*same_items=False"):
        count(accumulation, ONE, second)
    assert accumulation.backwards == 1
    assert not count(accumulation, ONE, second, same_items=False)
    assert not count(accumulation, OTHER, second)


def test_further_losses_of_the_same_items():
    accumulation = LossAccumulation()
    count(accumulation, ONE, 100)
    assert count(accumulation, ONE, 100, same_items=True)
    assert accumulation.weights == [100.0, 0.0]
    with pytest.raises(UsageError, match="over 50 items and the previous one over 100"):
        count(accumulation, ONE, 50, same_items=True)
    fresh = LossAccumulation()
    with pytest.raises(UsageError, match="this is the first one"):
        count(fresh, ONE, 8, same_items=True)
    count(fresh, None)
    assert count(fresh, None, same_items=True)


def test_sums_have_the_factor_one_and_no_weight():
    accumulation = LossAccumulation()
    assert not count(accumulation, ONE, summed=True)
    assert count(accumulation, ONE, summed=True)
    assert not count(accumulation, OTHER, summed=True)
    assert accumulation.weights == [8.0, 0.0, 8.0]
    assert accumulation.losses == [2.0] * 3
    assert weigh(Batch(samples=0), None, summed=True) == LossWeight(
        factor=0.0, items=0.0, shown=0.0
    )
    with pytest.raises(UsageError, match="different values of `reduction`"):
        count(accumulation, ONE)
    accumulation.clear()
    assert not count(accumulation, ONE)


def test_words_for_a_reduction():
    assert divisor_of("mean", weighted=True, replicas=4) == 0
    assert divisor_of("sum", weighted=False, replicas=4) == 1
    assert divisor_of("ddp", weighted=False, replicas=4) == 4
    with pytest.raises(UsageError, match="one of mean, sum, ddp, not 'total'"):
        divisor_of("total", weighted=False, replicas=4)
    for word in ("sum", "ddp"):
        with pytest.raises(UsageError, match=f'reduction="{word}".*remove one of the two'):
            divisor_of(word, weighted=True, replicas=4)


def mixes_of(batches, losses):
    """Return the range that ranks compare after `losses` means over items of each batch."""
    accumulation = LossAccumulation()
    for batch in batches:
        for items in losses:
            terms = LossTerms([Term("mean", items, "a"), Term("mean", 3 * items, "b")])
            weight = weigh(batch, None, summed=False, terms=terms)
            term = accumulation.term(batch, weight, given=False, divisor=0.0, terms=terms)
            accumulation.add(LOSS, term, 0.0)
    return accumulation.mix_range()


def test_losses_of_each_of_several_batches_mix_alike():
    low, high = mixes_of([ONE, OTHER], [8.0, 4.0, 2.0])
    assert low == high
    assert mixes_of([ONE], [8.0, 4.0, 2.0]) == (low, high)


def test_a_loss_of_weight_0_fits_with_sums():
    accumulation = LossAccumulation()
    assert not count(accumulation, ONE, 0)
    assert not accumulation.is_said
    assert not count(accumulation, OTHER, summed=True)
    assert not count(accumulation, None, 0)
    assert (accumulation.divisor, accumulation.losses) == (1.0, [0.0, 2.0, 0.0])


def test_a_sum_in_several_micro_batches_is_not_averaged():
    summed = LossTerms([Term("sum", 1.0, "sum")])
    for weights, is_mixed in (([2.0, 2.0], True), ([4.0, 0.0], False)):
        accumulation = LossAccumulation()
        weight = weigh(ONE, None, summed=False)
        term = accumulation.term(ONE, weight, given=False, divisor=0.0)
        parts = [(summed, each) for each in weights]
        accumulation.add(LOSS, replace(term, parts=parts), 0.0)
        low, high = accumulation.mix_range()
        assert (low < high) == is_mixed
