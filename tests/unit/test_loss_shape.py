"""Which losses look like sums over the batch."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardwise.engine.loss_shape import is_sum

ROWS = 6


def made(loss_of):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    return loss_of(model, model(torch.randn(ROWS, 4)), torch.randint(3, (ROWS,)))


SUMS = {
    "cross entropy": lambda m, out, y: F.cross_entropy(out, y, reduction="sum"),
    "mse": lambda m, out, y: F.mse_loss(out, torch.zeros_like(out), reduction="sum"),
    "sum": lambda m, out, y: out.square().sum(),
    "half of a sum": lambda m, out, y: 0.5 * out.square().sum(),
    "a VAE's": lambda m, out, y: (
        F.binary_cross_entropy_with_logits(out, torch.ones_like(out)) * 0.1
        + -0.5 * (1 + out - out.exp()).sum()
    ),
    "a reconstruction flattened": lambda m, out, y: F.binary_cross_entropy(
        out.sigmoid().view(-1), torch.ones(ROWS * 3), reduction="sum"
    ),
}
MEANS = {
    "cross entropy": lambda m, out, y: F.cross_entropy(out, y),
    "mean": lambda m, out, y: out.square().mean(),
    "divided": lambda m, out, y: out.square().sum() / len(out),
    "multiplied by one over the rows and columns": lambda m, out, y: out.sum() * (1 / (ROWS * 4)),
    "rows summed, then their mean": lambda m, out, y: out.square().sum(1).mean(),
    "with a penalty": lambda m, out, y: (
        out.mean() + 0.1 * sum(p.square().sum() for p in m.parameters())
    ),
}


@pytest.mark.parametrize("name", SUMS)
def test_a_sum(name):
    assert is_sum(made(SUMS[name]), ROWS)


@pytest.mark.parametrize("name", MEANS)
def test_a_mean(name):
    assert not is_sum(made(MEANS[name]), ROWS)


def test_what_hooks_keep_is_not_unpacked():
    unpacked = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: unpacked.append(t) or t):
        loss = made(SUMS["half of a sum"])
    assert not is_sum(loss, ROWS, look=False)
    assert not unpacked
