"""Gradients that code inside the autograd graph sees: hooks and autograd.Functions."""

import copy
import re

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.errors import UsageError
from tests.distributed.group import RankFailed
from tests.distributed.sharded import WIDTH, Block, Stack, batch

LIMIT = 0.005
"""Clamps most of the gradients in these models."""


class Clamp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad.clamp(-LIMIT, LIMIT)


def by_function(model, x):
    return model.head(Clamp.apply(model.blocks(model.stem(x))))


def by_hook(model, x):
    hidden = model.blocks(model.stem(x))
    hidden.register_hook(lambda grad: grad.clamp(-LIMIT, LIMIT))
    return model.head(hidden)


def clamp_in_module(module, grad_input, grad_output):
    return tuple(grad.clamp(-LIMIT, LIMIT) for grad in grad_input)


def by_module(model, x):
    if not model.head._backward_hooks:
        model.head.register_full_backward_hook(clamp_in_module)
    return model.head(model.blocks(model.stem(x)))


WAYS = {"function": by_function, "hook": by_hook, "module": by_module}


def net():
    torch.manual_seed(3)
    model = Stack()
    model.blocks = nn.Sequential(*model.blocks)
    return model.double()


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.5)


def plain(way, count):
    """Return parameters after steps of `count` full backward passes in plain PyTorch."""
    model = net()
    optimizer = sgd(model)
    for step in range(5):
        optimizer.zero_grad()
        for number in range(count):
            WAYS[way](model, rows(step, number)).square().mean().backward()
        for parameter in model.parameters():
            parameter.grad /= count
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def rows(step, number=0):
    """Return a batch. The third batch is short."""
    return batch(10 * step + number, rows=5 if step == 2 else 8)


def trained(world, way, kind, settings):
    """Return the parameters after the same training with an engine."""
    model = net()
    engine = sw.Engine(model, sgd(model), **settings)
    for step in range(5):
        if kind == "parts":
            engine.forward_backward(
                lambda x: WAYS[way](model, x).square().mean(), world.share(rows(step))
            )
            engine.step()
            continue
        for number in range(3 if kind == "accumulated" else 1):
            x = world.share(rows(step, number))
            squares = WAYS[way](model, x).square()
            if kind == "sum":
                engine.backward(squares.sum() / (2 * len(rows(step))), reduction="sum")
            elif kind == "tokens":
                engine.backward(squares.mean(), weight=7.0 * (step + 1) * len(x))
            else:
                engine.backward(squares.mean())
        engine.step()
    with engine.full_parameters():
        return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize(
    ("size", "kind", "way", "settings"),
    [
        (1, "mean", "hook", {}),
        (1, "accumulated", "function", {}),
        (1, "sum", "module", {}),
        (1, "tokens", "hook", {"zero": 3}),
        (1, "parts", "function", {"microbatches": 3}),
        (2, "mean", "function", {}),
        (2, "accumulated", "hook", {"zero": 2}),
        (3, "mean", "module", {"zero": 3}),
        (3, "sum", "hook", {"zero": 1}),
        (3, "tokens", "function", {}),
    ],
)
def test_code_in_the_graph_sees_the_gradients_of_one_process(group, size, kind, way, settings):
    want = plain(way, 3 if kind == "accumulated" else 1)
    for got in group(size)(trained, way, kind, settings):
        for mine, right in zip(got, want, strict=True):
            torch.testing.assert_close(mine, right, rtol=1e-9, atol=1e-11)


def with_hook(world, hook):
    """Compare with plain PyTorch after steps with `hook` on a parameter.

    Returns the largest difference of the parameters, and the number of calls of the hook in both.
    """
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Block()).double()
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    reference = copy.deepcopy(model)
    calls = []
    for net_ in (model, reference):
        net_[0].weight.register_hook(lambda grad: (calls.append(grad), HOOKS[hook](grad))[1])
    engine = sw.Engine(model, sgd(model))
    optimizer = sgd(reference)
    for step in range(3):
        engine.backward(model(world.share(batch(step))).square().mean())
        engine.step()
        optimizer.zero_grad()
        reference(batch(step)).square().mean().backward()
        optimizer.step()
    apart = max(
        float((a - b).detach().abs().max())
        for a, b in zip(model.parameters(), reference.parameters(), strict=True)
    )
    return apart, len(calls)


HOOKS = {
    "mask": lambda grad: grad * torch.arange(WIDTH).remainder(2),
    "reads": lambda grad: None,
    "clamp": lambda grad: grad.clamp(-0.01, 0.01),
    "loose clamp": lambda grad: grad.clamp(-1000.0, 1000.0),
    "abs": lambda grad: grad.abs(),
    "normalise": lambda grad: grad / grad.norm(),
    "noise": lambda grad: grad + 0.1 * torch.randn_like(grad),
}


@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_on_parameters_that_are_not_linear_are_refused(group, hook):
    if hook in ("mask", "reads"):
        for apart, calls in group(2)(with_hook, hook):
            assert apart < 1e-12
            assert calls == 6 + (hook == "mask")  # autograd itself calls a hook that only reads
        return
    with pytest.raises(RankFailed, match=re.escape("0.weight (tests/distributed/test_gradients_")):
        group(2)(with_hook, hook)


def test_any_hook_is_correct_if_it_sees_the_whole_gradient(group):
    for hook in ("clamp", "abs"):
        ((apart, calls),) = group(1)(with_hook, hook)
        assert apart < 1e-12
        assert calls == 6


def extreme(world, hook, scales):
    """Return whether backwards of losses of each of `scales` are refused, with `hook` on a
    parameter."""
    model = nn.Linear(WIDTH, 1, bias=False)
    model.weight.register_hook(HOOKS[hook])
    engine = sw.Engine(model, sgd(model))
    refused = []
    for scale in scales:
        try:
            engine.backward((model(torch.ones(2, WIDTH)) * scale).mean())
        except UsageError as error:
            refused.append("is not linear" in str(error))
        else:
            refused.append(False)
        engine.zero_grad()
    return refused


@pytest.mark.parametrize("hook", ["mask", "clamp", "normalise"])
@pytest.mark.parametrize("scale", [float("nan"), float("inf"), 0.0])
def test_hooks_are_tried_once_a_gradient_is_finite_and_not_zero(group, hook, scale):
    for refused in group(2)(extreme, hook, [scale, 1.0]):
        assert refused == [False, hook != "mask"]


def seen_after_accumulation(world, zero):
    """Return how often a post-accumulate-grad hook runs if it was added after the engine."""
    model = net()
    engine = sw.Engine(model, sgd(model), zero=zero)
    seen = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.norm().item()))
    for step in range(3):
        engine.backward(model.head(model.blocks(model.stem(world.share(rows(step))))).sum())
        engine.step()
    return len(seen) == 3 * len(list(model.parameters()))


@pytest.mark.parametrize(("size", "zero"), [(1, 0), (1, 3), (2, 2), (2, 3)])
def test_hooks_registered_after_the_engine_see_accumulated_gradients(group, size, zero):
    assert all(group(size)(seen_after_accumulation, zero))
