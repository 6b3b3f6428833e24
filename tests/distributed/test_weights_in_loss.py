"""User code that computes with weights outside of their layers, if these are split or on other
workers: penalties in the loss, norms in a log, writes, sizes."""

import copy
import math
import re
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardwise as sw
from shardwise.errors import ParameterAccess, UsageError

MESHES = [
    (2, {"tensor": 2}),
    (2, {"pipeline": 2}),
    pytest.param(4, {"tensor": 2, "pipeline": 2}, marks=pytest.mark.full),
    pytest.param(4, {"tensor": 2}, marks=pytest.mark.full),
]


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = 2
        self.qkv = nn.Linear(8, 24)
        self.proj = nn.Linear(8, 8)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        q, k, v = (each.unflatten(-1, (self.heads, -1)).transpose(-2, -3) for each in (q, k, v))
        mixed = (q @ k.transpose(-2, -1)).softmax(-1) @ v
        return self.proj(mixed.transpose(-2, -3).flatten(-2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attend = Attends()
        self.up, self.down = nn.Linear(8, 15), nn.Linear(15, 8)

    def forward(self, x):
        x = x + self.attend(x)
        return x + self.down(torch.tanh(self.up(x)))


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(Block(), Block(), nn.Linear(8, 1)).double()


def small(seed=0):
    """Build a model without repeated blocks: a single unit, gathered until backward ends."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 8), nn.Linear(8, 1)).double()


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def batch(step):
    draw = torch.Generator().manual_seed(step)
    return torch.randn(4, 3, 8, dtype=torch.double, generator=draw)


def squares(model):
    return sum(p.square().sum() for p in model.parameters())


def mean_squares(model):
    return sum(p.square().sum() / p.numel() for p in model.parameters())


def norms(model):
    return sum(p.norm() for p in model.parameters())


def orthogonality(model):
    several = (model[0].up.weight, model[1].down.weight, model[1].attend.qkv.weight)
    return sum((w.T @ w - torch.eye(w.shape[1], dtype=w.dtype)).square().sum() for w in several)


def one_vector(model):
    return nn.utils.parameters_to_vector(model.parameters()).norm()


def relative(model):
    weight = model[0].up.weight
    return weight.square().sum() / weight.detach().abs().max() + F.normalize(weight).sum()


def all_of_them(model):
    several = (squares, mean_squares, norms, orthogonality, one_vector, relative)
    return sum(0.2 * penalty(model) for penalty in several)


def plain(penalty, micros, made=net):
    model = made()
    optimizer, seen = sgd(model), []
    for step in range(3):
        loss = 0.0
        for part in batch(step).chunk(micros):
            loss = loss + (model(part).square().mean() + 0.1 * penalty(model)) / micros
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), math.inf)
        optimizer.step()
        optimizer.zero_grad()
        seen.append((loss.item(), norm.item(), one_vector(model).item()))
    return seen


def trains(world, penalty, how, options, made=net):
    model = made()
    engine = sw.Engine(model, sgd(model), microbatches=2, **options)
    seen = []
    for step in range(3):
        x = world.share(batch(step))
        if how == "by the schedule":
            engine.forward_backward(lambda x: model(x).square().mean() + 0.1 * penalty(model), x)
        elif how == "before the forward":
            engine.backward(0.1 * penalty(model) + model(x).square().mean())
        else:
            engine.backward(model(x).square().mean() + 0.1 * penalty(model))
        stats = engine.step()
        with torch.no_grad(), engine.full_parameters() if made is small else nullcontext():
            length = one_vector(model).item()
        seen.append((stats.loss, stats.grad_norm, length))
    engine.close()
    return seen


HOW = [
    (all_of_them, "in a plain loop"),
    (all_of_them, "by the schedule"),
    (norms, "before the forward"),
]


@pytest.mark.parametrize(("size", "mesh"), MESHES, ids=str)
def test_penalties_on_weights(group, size, mesh):
    for penalty, how in HOW:
        wanted = plain(penalty, 2 if how == "by the schedule" else 1)
        for seen in group(size, **mesh)(trains, penalty, how, {"zero": 1}):
            assert len(seen) == len(wanted)
            for found, each in zip(seen, wanted, strict=True):
                assert found == pytest.approx(each, rel=1e-8), (penalty, how)


def test_penalties_with_sequence_parallel(group):
    for seen in group(2, tensor=2)(trains, norms, "plain", {"sequence_parallel": True}):
        for found, each in zip(seen, plain(norms, 1), strict=True):
            assert found == pytest.approx(each, rel=1e-8)


@pytest.mark.parametrize(("size", "mesh"), [*MESHES[:2], MESHES[3], (4, {"pipeline": 2})], ids=str)
def test_penalties_on_sharded_weights(group, size, mesh):
    wanted = plain(norms, 1, small)
    for seen in group(size, **mesh)(trains, norms, "in a plain loop", {"zero": 3}, small):
        for found, each in zip(seen, wanted, strict=True):
            assert found == pytest.approx(each, rel=1e-8)


def refused(world, micros):
    model = net()
    engine = sw.Engine(model, sgd(model), zero=3, microbatches=micros)
    try:
        engine.forward_backward(
            lambda x: model(x).square().mean() + 0.1 * model[0].up.weight.square().sum(),
            world.share(batch(0)),
        )
    except ParameterAccess as error:
        return str(error)
    finally:
        engine.close()
    return "taken"


@pytest.mark.parametrize("micros", [1, 4])
def test_all_ranks_reject_weights_that_only_forwards_have(group, micros):
    first, *others = group(4, pipeline=2)(refused, micros)
    assert first.startswith("0.up.weight was read (outside of its module) while it is sharded")
    assert "in the forward of the module that registers it" in first
    assert others == [first] * 3


def counts(world):
    """Return the number of elements of weights: between forward passes, and while gathered."""
    model = net()
    engine = sw.Engine(model, sgd(model), zero=3)
    found = [[p.numel() for p in model.parameters()]]
    loss = model(batch(0)).square().mean()
    found.append([math.prod(p.shape) for p in model.parameters()])
    engine.backward(loss)
    engine.step()
    engine.close()
    return found


@pytest.mark.parametrize(("size", "mesh"), MESHES[:3], ids=str)
def test_sharded_weights_have_the_sizes_of_one_process(group, size, mesh):
    wanted = [p.numel() for p in net().parameters()]
    for found in group(size, **mesh)(counts):
        assert found == [wanted, wanted]


def looks(world):
    """Compare sizes, values and gradients of weights with one process."""
    model, same = net(), net()
    engine = sw.Engine(model, sgd(model))
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in same.parameters())
    for mine, its in zip(model.parameters(), same.parameters(), strict=True):
        assert mine.shape == its.shape
        assert "several workers" in repr(mine) or mine.shape == mine.data.shape
        assert torch.equal(mine, its)
        assert mine.mean().item() == pytest.approx(its.mean().item(), rel=1e-12)
    model.to(world.device)
    model.requires_grad_(True)
    with torch.no_grad():
        for each in (model, same):
            for parameter in each.parameters():
                parameter.mul_(0.9).clamp_(-0.2, 0.2)
    with engine.full_parameters(model[2]):
        for mine, its in zip(model.parameters(), same.parameters(), strict=True):
            assert torch.equal(mine, its)
    with engine.full_parameters():
        for mine, its in zip(model.parameters(), same.parameters(), strict=True):
            assert type(mine) is nn.Parameter
            assert torch.equal(mine, its)
        assert all(type(p) is nn.Parameter for p in copy.deepcopy(model).parameters())
    engine.close()
    assert all(type(p) is nn.Parameter for p in model.parameters())
    return True


@pytest.mark.parametrize(("size", "mesh"), MESHES[:3], ids=str)
def test_weights_are_read_as_in_one_process(group, size, mesh):
    assert all(group(size, **mesh)(looks))


def differentiates(world):
    model, same = net(), net()
    engine = sw.Engine(model, sgd(model))
    found = []
    for each in (model, same):
        loss = each(batch(0)).square().mean()
        grads = torch.autograd.grad(loss, list(each.parameters()), create_graph=True)
        found.append(sum(grad.norm() for grad in grads))
    engine.backward(found[0])
    norm = engine.step().grad_norm
    found[1].backward()
    wanted = nn.utils.clip_grad_norm_(same.parameters(), math.inf).item()
    engine.close()
    return found[0].item(), found[1].item(), norm, wanted


def test_gradients_of_weights_inside_of_a_loss(group):
    for mine, its, norm, wanted in group(2, tensor=2)(differentiates):
        assert mine == pytest.approx(its, rel=1e-8)
        assert norm == pytest.approx(wanted, rel=1e-8)


def misuses(world, how):
    model = net()
    engine = sw.Engine(model, sgd(model))
    weight = model[0].up.weight
    try:
        with torch.no_grad():
            if how == "init":
                nn.init.xavier_uniform_(weight)
            elif how == "copy_":
                weight.copy_(torch.zeros(15, 8))
            elif how == "data":
                weight.data = torch.zeros(15, 8, dtype=torch.double)
            elif how == "deepcopy":
                copy.deepcopy(weight)
            elif how == "grad":
                torch.autograd.grad(model(batch(0)).mean(), weight)
    except UsageError as error:
        return str(error)
    finally:
        engine.close()
    return "taken"


@pytest.mark.parametrize(
    ("how", "mesh", "hint"),
    [
        ("init", {"tensor": 2}, "uniform_ writes into .*full_parameters\\(write=True\\)"),
        ("copy_", {"tensor": 2}, "copy_ writes into .*full_parameters\\(write=True\\)"),
        ("data", {"tensor": 2}, "p.data = .*full_parameters\\(write=True\\)"),
        ("deepcopy", {"tensor": 2}, "A split parameter cannot be copied"),
        (
            "deepcopy",
            {"pipeline": 2},
            "A copy of a model is not possible when this worker has only some of its layers",
        ),
        ("grad", {"pipeline": 2}, "each worker has only a part of the graph"),
    ],
)
def test_rejects_uses_that_need_the_whole(group, how, mesh, hint):
    for said in group(2, **mesh)(misuses, how):
        assert re.search(hint, said), said


WRITES = {
    "detached": lambda p: p.detach().mul_(0),
    "slice": lambda p: p[:, 0:4].zero_(),
    "view": lambda p: p.view(-1).zero_(),
    "rows": lambda p: [row.zero_() for row in p],
    "transposed": lambda p: p.T[0].fill_(1),
    "several": lambda p: torch._foreach_copy_([p], [torch.zeros(15, 8, dtype=p.dtype)]),
}


def written_into_a_copy(world, name):
    model = net()
    engine = sw.Engine(model, sgd(model))
    x = torch.ones(15, 8, dtype=torch.double)
    with torch.no_grad():
        x.mul_(model[0].up.weight.detach())  # the user's own tensors may be written
        torch._foreach_mul_([model[0].up.weight], 0.5)
    try:
        with torch.no_grad():
            WRITES[name](model[0].up.weight)
    finally:
        engine.close()


@pytest.mark.parametrize("name", WRITES)
def test_rejects_writes_into_a_copy(group, name):
    for kind, message in group(2, tensor=2).errors(written_into_a_copy, name):
        assert kind == UsageError.__name__
        assert "writes into" in message
        assert "full_parameters(write=True)" in message
