"""Metrics on real ranks: the exact mean over all items, in one round, and its errors."""

import dataclasses
import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

from shardwise.data import Loader
from shardwise.errors import MetricsError, UsageError
from shardwise.metrics import Metrics

SIZES = (1, 2, 3, 4)


def _evaluate(world, length, batch, micro=None):
    """Return means over a dataset whose stand-ins would give NaN."""
    metrics = Metrics()
    with torch.no_grad():
        for (x,) in Loader(TensorDataset(torch.arange(length)), batch, micro_batch_size=micro):
            mean = x.double().mean()
            if world.current_batch.batch.samples == 0:
                mean = mean * math.nan
            metrics.add(mean=mean, even=(x % 2 == 0).float().mean())
    return metrics.compute()


@settings(
    max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.sampled_from(SIZES), st.integers(1, 30), st.integers(4, 9), st.none() | st.integers(1, 3))
def test_means_are_exact_for_any_size_and_stand_ins_never_count(group, size, length, batch, micro):
    results = group(size)(_evaluate, length, batch, micro)
    assert all(result == results[0] for result in results)
    assert list(results[0]) == ["mean", "even"]
    assert results[0]["mean"] == pytest.approx((length - 1) / 2, rel=1e-12)
    assert results[0]["even"] == pytest.approx(((length + 1) // 2) / length, rel=1e-6)


def _by_hand(world):
    metrics = Metrics()
    metrics.add(n=world.rank, loss=float(world.rank), count=1)
    metrics.add(n=torch.tensor(2), loss=torch.tensor(10.0))
    first = metrics.compute()
    metrics.add(n=1, loss=5.0)
    return first, metrics.compute(), metrics.compute()


def test_weights_differ_by_rank_and_compute_starts_over(group):
    # loss: ranks give 0*0 + 2*10, 1*1 + 2*10, 2*2 + 2*10 over 2 + 3 + 4 items
    for result in group(3)(_by_hand):
        assert result == ({"loss": 65 / 9, "count": 1.0}, {"loss": 5.0}, {})


def _disagree(world):
    metrics = Metrics()
    names = {0: ["loss"], 1: ["loss", "accuracy"], 2: [], 3: ["loss"]}[world.rank]
    metrics.add(n=1, **dict.fromkeys(names, 1.0))
    metrics.compute()


def test_names_that_differ_are_named_with_their_ranks_on_all_ranks(group):
    errors = group(4).errors(_disagree)
    assert len(set(errors)) == 1
    name, message = errors[0]
    assert name == "MetricsError"
    assert "rank(s) 0, 3: loss; rank(s) 1: accuracy, loss; rank(s) 2: nothing" in message


def _negative(world):
    metrics = Metrics()
    metrics.add(n=torch.tensor(-1 if world.rank else 1), loss=1.0)
    metrics.compute()


def test_a_negative_weight_on_the_device_is_found_when_computing(group):
    errors = group(2).errors(_negative)
    assert len(set(errors)) == 1
    assert errors[0][0] == "MetricsError"
    assert "loss was added on rank 1 with a total n of -1.0" in errors[0][1]


# --- alone ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": -1, "loss": 1.0}, "n of 0 or more, not -1"),
        ({"n": math.nan, "loss": 1.0}, "n of 0 or more, not nan"),
        ({"n": 1, "loss": torch.ones(3)}, r"loss is a tensor of shape \(3,\)"),
        ({"n": 1, "loss": "low"}, "loss is a str"),
        ({"n": [1], "loss": 1.0}, "n is a list"),
    ],
)
def test_refuses_values_that_are_no_scalars(solo, options, message):
    metrics = Metrics()
    with pytest.raises(MetricsError, match=message):
        metrics.add(**options)
    assert metrics.compute() == {}


def test_requires_n_without_a_batch(solo):
    with pytest.raises(UsageError, match=r"write metrics\.add\(n=len\(x\)"):
        Metrics().add(loss=1.0)


def test_a_mean_over_no_items_is_nan(solo):
    metrics = Metrics()
    metrics.add(n=0, loss=math.nan)
    metrics.add(n=torch.tensor(0), loss=torch.tensor(math.inf))
    assert math.isnan(metrics.compute()["loss"])
    metrics.add(n=0, loss=math.nan)
    metrics.add(n=2, loss=3)
    assert metrics.compute() == {"loss": 3.0}


def test_values_that_are_not_finite_show(solo):
    metrics = Metrics()
    metrics.add(n=1, a=math.nan, b=math.inf, c=math.inf)
    metrics.add(n=1, a=1.0, b=1.0, c=-math.inf)
    result = metrics.compute()
    assert math.isnan(result["a"])
    assert result["b"] == math.inf
    assert math.isnan(result["c"])


def test_a_sum_is_kept_in_float64(solo):
    metrics = Metrics()
    for _ in range(100):
        metrics.add(n=1, loss=torch.tensor(0.1))
    metrics.add(n=100, loss=torch.tensor(1e8))
    expected = (100 * torch.tensor(0.1).double().item() + 1e10) / 200
    assert metrics.compute()["loss"] == pytest.approx(expected, rel=1e-15)


def test_a_value_needs_no_graph(solo):
    metrics = Metrics()
    loss = torch.ones((), requires_grad=True) * 2
    metrics.add(n=1, loss=loss)
    assert not metrics._sums["loss"]._total.requires_grad


def counted(world, exact):
    """Return a mean over numbers of very different size, divided among ranks."""
    world.settings = dataclasses.replace(world.settings, exact=4 if exact else None)
    values = torch.randn(400, generator=torch.Generator().manual_seed(1)).double().exp2() ** 9
    metrics = Metrics()
    for value in values[world.rank :: world.size]:
        metrics.add(n=0.3, mean=value)
    return metrics.compute()["mean"]


def test_exact_mode_bits_do_not_depend_on_the_ranks(group):
    assert group(1)(counted, True) * 3 == group(3)(counted, True)
    assert group(1)(counted, False) * 3 == pytest.approx(group(3)(counted, False))


def test_the_exact_mode_keeps_what_is_not_finite(solo):
    solo.settings = dataclasses.replace(solo.settings, exact=1)
    metrics = Metrics()
    for up, both in ((1.0, math.inf), (math.inf, 2.0), (3.0, -math.inf)):
        metrics.add(n=1, up=up, both=both)
    found = metrics.compute()
    assert found["up"] == math.inf
    assert math.isnan(found["both"])
