"""Optimizers that need full tensors (Muon, Adafactor) on layers that tensor parallelism splits."""

import copy

import pytest
import torch

import shardwise as sw
from shardwise.errors import ModelError
from tests.distributed.test_checkpoint import Whole
from tests.distributed.test_tensor import TIED, batch, gpt, train, whole
from tests.parity.problems import loss_of
from tests.tables import each_value


def muon(model):
    matrices = [p for p in model.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if p.ndim != 2]
    return [
        torch.optim.Muon(matrices, lr=0.02, weight_decay=0.1),
        torch.optim.AdamW(rest, lr=1e-2),
    ]


OPTIMIZERS = {
    "muon": muon,
    "adafactor": lambda model: [torch.optim.Adafactor(model.parameters(), lr=1e-2)],
    "unknown": lambda model: [Whole(model.parameters())],
}


def plain(name, steps):
    """Train one plain process. Return the losses, the weights and the optimizers' state."""
    model = gpt()
    optimizers = OPTIMIZERS[name](model)
    losses = []
    for step in range(steps):
        x = batch(step)
        loss = loss_of(model, x, (x * 5 + 1) % 24)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.state_dict(), [optimizer.state_dict() for optimizer in optimizers]


def result(engine, model, optimizers):
    states = [copy.deepcopy(engine.optimizer_state_dict(each)) for each in optimizers]
    return whole(engine, model), states


def close(mine, theirs):
    for (weights, states), (known, kept) in [(mine, theirs)]:
        for name, value in known.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-8, atol=1e-11, msg=name)
        for state, other in zip(states, kept, strict=True):
            torch.testing.assert_close(state["state"], other["state"], rtol=1e-8, atol=1e-11)


def trains(world, name, options):
    model = gpt(seed=5 + world.rank)
    optimizers = OPTIMIZERS[name](model)
    engine = sw.Engine(model, optimizers, tensor_plan=TIED, bucket_mb=0.005, **options)
    losses = train(world, engine, model, range(6))
    weights, states = result(engine, model, optimizers)
    engine.close()
    # `close` restores full parameters and full optimizer state.
    for optimizer, state in zip(optimizers, states, strict=True):
        torch.testing.assert_close(optimizer.state_dict()["state"], state["state"], rtol=0, atol=0)
    return losses, weights, states


@each_value(name=list(OPTIMIZERS), mesh=[(4, 2), (3, 3)], zero=[0, 1, 2, 3])
def test_equals_one_process(group, name, mesh, zero):
    size, tensor = mesh
    losses, weights, states = plain(name, 6)
    results = group(size, tensor=tensor)(trains, name, {"zero": zero}, limit=120)
    for mine, *rest in results:
        assert mine == pytest.approx(losses, rel=1e-8)
        close(rest, (weights, states))


@pytest.mark.parametrize(
    "options",
    [
        {"zero": 2, "sequence_parallel": True},
        {"zero": 3, "offload_optimizer": "cpu"},
        {"zero": 0, "activations": "recomputed"},
    ],
    ids=str,
)
def test_muon_equals_one_process_with(group, options):
    losses, weights, states = plain("muon", 6)
    for mine, *rest in group(4, tensor=2)(trains, "muon", options, limit=120):
        assert mine == pytest.approx(losses, rel=1e-8)
        close(rest, (weights, states))


def saves(world, folder, name, zero):
    model = gpt(seed=5 + world.rank)
    optimizers = OPTIMIZERS[name](model)
    engine = sw.Engine(model, optimizers, zero=zero, tensor_plan=TIED)
    train(world, engine, model, range(3))
    path = engine.save(folder)
    told = result(engine, model, optimizers)
    after = train(world, engine, model, [3, 4, 5])
    engine.close()
    return str(path), *told, after


def resumes(world, path, name, zero):
    model = gpt(seed=9)
    optimizers = OPTIMIZERS[name](model)
    plan = TIED if world.settings.tensor > 1 else None
    engine = sw.Engine(model, optimizers, zero=zero, tensor_plan=plan)
    engine.load(path)
    told = result(engine, model, optimizers)
    after = train(world, engine, model, [3, 4, 5])
    engine.close()
    return *told, after


@each_value(
    name=list(OPTIMIZERS), first=[(4, 2, 2), (2, 2, 0), (1, 1, 0)], second=[(3, 3, 1), (4, 2, 3)]
)
def test_resumes_on_another_mesh(group, tmp_path, name, first, second):
    size, tensor, zero = first
    path, weights, states, after = group(size, tensor=tensor)(
        saves, tmp_path, name, zero, limit=120
    )[0]
    size, tensor, zero = second
    for mine, kept, losses in group(size, tensor=tensor)(resumes, path, name, zero, limit=120):
        assert all(torch.equal(mine[key], value) for key, value in weights.items())
        for state, other in zip(kept, states, strict=True):
            torch.testing.assert_close(state["state"], other["state"], rtol=0, atol=0)
        assert losses == pytest.approx(after, rel=1e-8)


def masters(world, zero):
    """Return the bf16 weights of a model whose fp32 masters are split and joined in each update."""
    model = gpt().bfloat16()
    optimizers = muon(model)
    engine = sw.Engine(model, optimizers, zero=zero, tensor_plan=TIED)
    train(world, engine, model, range(3))
    weights, _ = result(engine, model, optimizers)
    kept = engine.optimizer_state_dict(optimizers[0])["fp32_master_weights"]
    engine.close()
    return weights, kept


def test_masters_of_16_bit_weights_are_full(group):
    for weights, kept in group(4, tensor=2)(masters, 2):
        by_shape = {tuple(value.shape) for value in weights.values() if value.ndim == 2}
        assert {tuple(value.shape) for value in kept.values()} == by_shape
        assert all(value.dtype == torch.float32 for value in kept.values())


class Together(torch.optim.Optimizer):
    """Scales every update by the norm over all parameters."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        members = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in members]).norm()
        for p in members:
            p.sub_(p.grad / norm, alpha=0.1)


def refused(world):
    model = gpt()
    with pytest.raises(ModelError, match=r"combines values of several tensors.*--tensor 2 splits"):
        sw.Engine(model, Together(model.parameters()), zero=0)
    return True


def test_refuses_optimizers_that_combine_tensors(group):
    assert all(group(2, tensor=2)(refused))


class Preconditioned(torch.optim.Optimizer):
    """Multiplies gradients by the inverses of two matrices, of which one has a part's shape."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            state, grad = self.state[p], p.grad
            if not state:
                state["left"], state["right"] = (torch.eye(n, dtype=p.dtype) for n in p.shape)
            state["left"] += grad @ grad.T
            state["right"] += grad.T @ grad
            p -= 0.1 * torch.linalg.inv(state["left"]) @ grad @ torch.linalg.inv(state["right"])


AMBIGUOUS = {
    "preconditioned": (8, Preconditioned),
    "adafactor": (2, lambda params: torch.optim.Adafactor(params, lr=1e-2)),
}
"""Hidden features and optimizers, of which full state has the shape of a part of its parameter."""


def ambiguous(name):
    torch.manual_seed(3)
    hidden, make = AMBIGUOUS[name]
    layers = [torch.nn.Linear(4, hidden, bias=False), torch.nn.Linear(hidden, 4, bias=False)]
    model = torch.nn.Sequential(layers[0], torch.nn.Tanh(), layers[1]).double()
    return model, make(model.parameters())


def loss_at(model, step):
    x = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
    return (model(x) - 1).square().mean()


def plain_ambiguous(name, steps):
    model, optimizer = ambiguous(name)
    for step in range(steps):
        optimizer.zero_grad()
        loss_at(model, step).backward()
        optimizer.step()
    return model.state_dict(), [optimizer.state_dict()]


def ambiguous_case(world, name, zero, folder, path):
    """Train steps 0 and 1 and save, or load `path`. Then train steps 2 and 3."""
    model, optimizer = ambiguous(name)
    plan = {"0": "colwise", "2": "rowwise"} if world.settings.tensor > 1 else None
    engine = sw.Engine(model, optimizer, tensor_plan=plan, zero=zero)
    if path is not None:
        engine.load(path)
    for step in range(0 if path is None else 2, 4):
        if step == 2 and path is None:
            path = engine.save(folder)
        engine.backward(loss_at(model, step))
        engine.step()
    found = result(engine, model, [optimizer])
    engine.close()
    torch.testing.assert_close(
        optimizer.state_dict()["state"], found[1][0]["state"], rtol=0, atol=0
    )
    return str(path), *found


@each_value(
    name=list(AMBIGUOUS), first=[(2, 2, 0), (4, 2, 1), (1, 1, 0)], second=[(4, 2, 3), (2, 2, 1)]
)
def test_full_state_may_have_the_shape_of_a_part(group, tmp_path, name, first, second):
    expected, path = plain_ambiguous(name, 4), None
    for size, tensor, zero in (first, second):
        ranks = group(size, tensor=tensor)(ambiguous_case, name, zero, tmp_path, path)
        path = ranks[0][0]
        for _, *found in ranks:
            close(found, expected)
