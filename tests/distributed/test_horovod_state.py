"""Optimizers and objects of one rank on all: what Horovod makes of them."""

import copy

import pytest
import torch
from torch import nn

import shardwise.horovod as hvd
from tests.distributed.horovod import initialized


def adam(params):
    return torch.optim.Adam(params, lr=0.1, weight_decay=0.3)


def momentum(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.3)


def plain_sgd(params):
    return torch.optim.SGD(params, lr=0.1, weight_decay=0.3)


def adagrad(params):  # which has its state from the beginning
    return torch.optim.Adagrad(params, lr=0.1, weight_decay=0.3)


def step(model, optimizer, number):
    optimizer.zero_grad()
    model(torch.full((2, 3), float(number), dtype=model.weight.dtype)).square().sum().backward()
    optimizer.step()


def horovods(make, model):
    """Return a fresh optimizer as Horovod leaves it: after a step with zero gradients."""
    optimizer = make(model.parameters())
    if not optimizer.state:
        for param in model.parameters():
            param.grad = torch.zeros_like(param)
        optimizer.step()
    return optimizer


WRAPS = {"plain": None, "before": {}, "adasum": {"op": hvd.Adasum}}


def _fresh(world, make, wrap):
    with initialized():
        torch.manual_seed(0)
        model = nn.Linear(3, 2).double()
        plain = copy.deepcopy(model)
        optimizer = make(model.parameters())
        if WRAPS[wrap] is not None:
            optimizer = hvd.DistributedOptimizer(optimizer, **WRAPS[wrap])
        if world.rank == 1 and wrap == "plain":  # the root's is what counts
            step(copy.deepcopy(model), optimizer, 1)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        expected = horovods(make, plain)
        if optimizer.state and make is not adagrad:
            assert not model.weight.grad.any()
        if wrap == "plain":
            optimizer = hvd.DistributedOptimizer(optimizer)
        for number in range(3):  # identical on all ranks, so the mean equals each rank's
            step(model, optimizer, number)
            step(plain, expected, number)
        pairs = zip(model.parameters(), plain.parameters(), strict=True)
        return max((a - b).abs().max().item() for a, b in pairs)


@pytest.mark.parametrize("make", [adam, momentum, plain_sgd, adagrad])
def test_a_fresh_optimizer_trains_as_horovods(group, make):
    for size in (1, 2):
        for wrap in WRAPS:
            assert max(group(size)(_fresh, make, wrap)) < 1e-12, (size, wrap)


def _trained_root(world):
    """Others than a root that has a state make no step: their weights are the root's already."""
    with initialized():
        model = nn.Linear(3, 2)
        optimizer = adam(model.parameters())
        if world.rank == 1:
            step(model, optimizer, 1)
        hvd.broadcast_parameters(model.state_dict(), root_rank=1)
        hvd.broadcast_optimizer_state(optimizer, root_rank=1)
        moment = optimizer.state[model.weight]["exp_avg"]
        return model.weight.tolist(), moment.tolist(), optimizer.state[model.weight]["step"].item()


def test_a_root_that_has_a_state(group):
    first, second = group(2)(_trained_root)
    assert first == second
    assert first[2] == 1.0


def _others(world):
    """Broadcast state for sparse zero gradients. Skip the step for LBFGS, which needs a closure."""
    with initialized(), torch.sparse.check_sparse_tensor_invariants():
        tables = [nn.Embedding(4, 2, sparse=True) for _ in range(2)]
        optimizer = torch.optim.SparseAdam(tables[0].parameters(), lr=0.1)
        hvd.broadcast_optimizer_state(optimizer, 0, model=tables[0])
        assert optimizer.state[tables[0].weight]["step"] == 1
        optimizer = torch.optim.SGD(tables[1].parameters(), lr=0.1, momentum=0.9)
        hvd.broadcast_optimizer_state(optimizer, 0)
        tables[1](torch.tensor([1])).sum().backward()  # adds to the zeros
        optimizer.step()
        weight = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.LBFGS([weight], lr=0.5 + world.rank)
        hvd.broadcast_optimizer_state(optimizer, root_rank=1)
        assert optimizer.param_groups[0]["lr"] == 1.5
        assert weight.grad is None


def test_sparse_states_and_lbfgs(group):
    group(2)(_others)


def _by_value(world):
    """Send objects that only one rank has: a lambda, and a class of its script."""
    with initialized():
        more = world.rank + 2
        double = hvd.broadcast_object(lambda x: more * x, root_rank=1)
        assert double(7) == 21
        functions = hvd.allgather_object(lambda: more)
        assert [function() for function in functions] == [2, 3]
        own = {"__name__": "__main__"}
        if world.rank == 0:
            exec("class Own:\n    value = 5\n", own)
        assert hvd.broadcast_object(own.get("Own"), root_rank=0)().value == 5
        assert hvd.broadcast_object(own["Own"]() if world.rank == 0 else None).value == 5


def test_functions_and_classes_travel_by_value(group):
    pytest.importorskip("cloudpickle")
    group(2)(_by_value)
