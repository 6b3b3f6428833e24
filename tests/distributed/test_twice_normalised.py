"""SyncBatchNorm in a loss that contains gradients: a gradient penalty."""

import math

import pytest
import torch
from torch import nn

import shardwise as sw


def critic():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4), nn.Tanh(), nn.Flatten(),
        nn.Linear(24, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 1),
    ).double()  # fmt: skip


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def penalised(model, x):
    x = x.clone().requires_grad_()
    made = model(x)
    (grad,) = torch.autograd.grad(made.sum(), x, create_graph=True)
    return made.square().mean() + (grad.flatten(1).norm(dim=1) - 1).square().mean()


def batch(step):
    draw = torch.Generator().manual_seed(step)
    return torch.randn(8, 3, 8, dtype=torch.double, generator=draw)


def trains(world):
    model = critic()
    engine = sw.Engine(model, sgd(model), sync_batch_norm=True)
    seen = []
    for step in range(3):
        engine.backward(penalised(model, world.share(batch(step))))
        stats = engine.step()
        seen.append((stats.loss, stats.grad_norm))
    engine.close()
    return seen


@pytest.mark.parametrize("size", [2, 4])
def test_a_gradient_penalty_over_all_ranks(group, size):
    model = critic()
    optimizer, wanted = sgd(model), []
    for step in range(3):
        loss = penalised(model, batch(step))
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), math.inf)
        wanted.append((loss.item(), norm.item()))
        optimizer.step()
        optimizer.zero_grad()
    for seen in group(size)(trains):
        for found, each in zip(seen, wanted, strict=True):
            assert found == pytest.approx(each, rel=1e-8)
