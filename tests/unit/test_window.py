"""How the losses of a step go together: what counts once, what is averaged, what is refused."""

import pytest
import torch

from shardwise.current_batch import Batch
from shardwise.engine.accumulation import Window
from shardwise.engine.exact_mean import Share, divisor_of, share_of
from shardwise.errors import UsageError

LOSS = torch.tensor(2.0)
ONE, OTHER = Batch(samples=8), Batch(samples=8)


def count(window, batch, weight=None, same_items=None, summed=False):
    """Whether the items of one more loss had been counted; it is added."""
    share = share_of(batch, weight, summed=summed)
    given = weight is not None
    window.check_reduction(float(summed))
    again = window.is_again(share, batch, given=given, same_items=same_items)
    window.divisor = float(summed)
    window.add(LOSS, share, batch, given=given, again=again)
    return again


def test_losses_of_one_batch_count_it_once():
    window = Window()
    assert [count(window, batch) for batch in (ONE, ONE, OTHER, ONE)] == [False, True, False, True]
    assert window.weights == [8.0, 0.0, 8.0, 0.0]
    assert window.losses == [16.0] * 4


def test_without_a_batch_each_loss_is_of_other_items():
    window = Window()
    assert not count(window, None)
    assert not count(window, None, weight=3)
    assert window.weights == [1.0, 3.0]


@pytest.mark.parametrize("weights", [(8, 8), (8, None), (None, 8), (100, 50)])
def test_a_weight_for_a_second_loss_of_a_batch_says_of_which_items(weights):
    first, second = weights
    window = Window()
    count(window, ONE, first)
    with pytest.raises(UsageError, match=r"same_items=True.*same_items=False"):
        count(window, ONE, second)
    assert window.backwards == 1
    assert not count(window, ONE, second, same_items=False)
    assert not count(window, OTHER, second)


def test_further_losses_of_the_same_items():
    window = Window()
    count(window, ONE, 100)
    assert count(window, ONE, 100, same_items=True)
    assert window.weights == [100.0, 0.0]
    with pytest.raises(UsageError, match="over 50 items and the one before over 100"):
        count(window, ONE, 50, same_items=True)
    fresh = Window()
    with pytest.raises(UsageError, match="this is the first one"):
        count(fresh, ONE, 8, same_items=True)
    count(fresh, None)
    assert count(fresh, None, same_items=True)


def test_sums_have_the_factor_one_and_no_weight():
    window = Window()
    assert not count(window, ONE, summed=True)
    assert count(window, ONE, summed=True)
    assert not count(window, OTHER, summed=True)
    assert window.weights == [8.0, 0.0, 8.0]
    assert window.losses == [2.0] * 3
    assert share_of(Batch(samples=0), None, summed=True) == Share(factor=0.0, items=0.0)
    with pytest.raises(UsageError, match=r"sums .* and losses that are means"):
        count(window, ONE)
    window.clear()
    assert not count(window, ONE)


def test_words_for_a_reduction():
    assert divisor_of("mean", weighted=True, replicas=4) == 0
    assert divisor_of("sum", weighted=False, replicas=4) == 1
    assert divisor_of("ddp", weighted=False, replicas=4) == 4
    with pytest.raises(UsageError, match="one of mean, sum, ddp, not 'total'"):
        divisor_of("total", weighted=False, replicas=4)
    for word in ("sum", "ddp"):
        with pytest.raises(UsageError, match=f'reduction="{word}".*leave one of them out'):
            divisor_of(word, weighted=True, replicas=4)
