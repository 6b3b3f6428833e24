"""A non-finite gradient: which rank is named, and which numbers count as not finite."""

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.errors import NonFiniteError


def nonfinite(world, model, bad):
    """Return the message about a NaN that only the ranks `bad` make, in the first parameter."""
    engine = sw.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), quiet=True)
    weight = next(model.parameters())
    engine.backward((weight * 0).sqrt().sum() if world.rank in bad else weight.sum())
    with pytest.raises(NonFiniteError) as caught:
        engine.step()
    engine.close()
    return str(caught.value)


def blame_case(world):
    small, large = nn.Linear(4, 4), nn.Linear(200, 200, bias=False)
    return nonfinite(world, small, {1}), nonfinite(world, large, {1})


def test_names_a_rank_only_with_proof(group):
    for small, large in group(2)(blame_case):
        assert "rank 1 (its gradient" in small
        assert "it is not known which rank is the cause" in large
        assert "finite)" not in large


def test_single_rank_names_no_rank(solo):
    message = nonfinite(solo, nn.Linear(4, 4), {0})
    assert "rank" not in message
    assert "not finite in weight. The loss is finite" in message


def large_case(world, zero):
    model = nn.Linear(2, 1, bias=False)
    engine = sw.Engine(model, torch.optim.SGD(model.parameters(), lr=1e-20), zero=zero, quiet=True)
    before = model.weight.detach().clone()
    engine.backward(model(torch.full((1, 2), 1e20)).sum())
    assert engine.step(max_norm=1e20).grad_norm == pytest.approx(2**0.5 * 1e20, rel=1e-6)
    assert torch.allclose(before - model.weight, torch.full((1, 2), 0.5**0.5))
    engine.close()


@pytest.mark.parametrize("zero", [0, 2])
def test_a_large_gradient_is_finite(group, zero):
    group(2)(large_case, zero)


def test_reports_endlessly_skipped_steps(solo, capsys):
    model = nn.Linear(2, 1)
    engine = sw.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), nonfinite="skip")
    for step in range(45):
        good = step == 3
        engine.backward((model(torch.ones(1, 2)) * (1.0 if good else float("nan"))).mean())
        assert engine.step().skipped != good
    said = capsys.readouterr().out
    assert said.count("20 steps in a row were skipped") == 1
    assert "--nonfinite stop" in said
