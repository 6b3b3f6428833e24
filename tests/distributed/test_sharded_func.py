"""Sharded parameters with torch.func: its transforms give the results of plain PyTorch."""

import importlib
import warnings
from functools import cache

import pytest
import torch
from torch import nn
from torch.func import (
    functional_call,
    functionalize,
    grad,
    grad_and_value,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    vjp,
    vmap,
)

from shardwise.errors import ParameterAccess
from tests.distributed.sharded import (
    WIDTH,
    Stack,
    agree,
    at_rest,
    batch,
    by_turns,
    every_size,
    on,
    seeded,
    sharded,
    squares,
    train,
)


@cache
def load_forward_mode():
    """torch compiles helpers for jvp at the first use, and calls a deprecated function for that."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        importlib.import_module("torch._decomp.decompositions_for_jvp")


def agree_forward(world, *arguments):
    load_forward_mode()
    return agree(world, *arguments)


def mean_flow(model, x, step, rank):
    """Return the loss of MeanFlow: an output and its directional derivative."""
    out, moved = jvp(model, (x,), (x.flip(1),))
    return (out - moved.detach()).square().mean() + 0.1 * moved.mean()


def pulled_back(model, x, step, rank):
    out, back = vjp(model, x)
    (pulled,) = back(out.flip(1))
    return out.square().mean() + pulled.square().mean()


def per_sample(model, x, step, rank):
    slopes = vmap(grad(lambda row: model(row).square().sum()))(x)
    return model(x).square().mean() + slopes.square().mean()


def slopes_alone(model, x, step, rank):
    """No output of the model is in the graph, only its gradients."""
    slopes, values = vmap(grad_and_value(lambda row: model(row).sin().sum()))(x)
    return slopes.square().mean() + values.detach().mean()


def detached_slopes(model, x, step, rank):
    slopes = grad(lambda rows: model(rows).square().sum())(x)
    return model(x + 0.1 * slopes.detach()).square().mean()


def untracked_slopes(model, x, step, rank):
    with torch.no_grad():
        slopes = grad(lambda rows: model(rows).square().sum())(x)
    return model(x + 0.1 * slopes).square().mean()


def jacobians(model, x, step, rank):
    backward, forward = vmap(jacrev(model))(x), vmap(jacfwd(model))(x)
    return backward.square().mean() + forward.sin().mean()


def curvature(model, x, step, rank):
    return vmap(hessian(lambda row: model(row).square().sum()))(x).square().mean()


def slope_of_a_slope(model, x, step, rank):
    inner = grad(lambda rows: model(rows).square().sum())
    return grad(lambda rows: inner(rows).square().sum())(x).square().mean()


def mapped(model, x, step, rank):
    return vmap(model)(x).square().mean() + vmap(vmap(model))(x[:, None]).mean()


def functionalized(model, x, step, rank):
    return functionalize(model)(x).square().mean()


def of_other_values(model, x, step, rank):
    """Run the model with parameters supplied by other code, and with its own."""
    named = model.named_parameters()
    others = {name: torch.full(p.shape, 0.1 * step, dtype=p.dtype) for name, p in named}
    return (model(x) - functional_call(model, others, x)).square().mean()


def of_its_own_values(model, x, step, rank):
    return functional_call(model, dict(model.named_parameters()), x).square().mean()


def by_its_own_values(model, x, step, rank):
    """Gradients of all parameters, without training."""
    own = dict(model.named_parameters())

    def loss(values, row):
        return functional_call(model, values, (row,)).square().sum()

    slopes = vmap(grad(loss), in_dims=(None, 0))(own, x)
    norms = sum(slope.detach().square().flatten(1).sum(1) for slope in slopes.values())
    return (model(x).square().mean(1) / (1 + norms)).mean()


def on_one_rank(model, x, step, rank):
    return slopes_alone(model, x, step, rank) if rank == 0 else squares(model, x, step, rank)


def with_a_weight_read(model, x, step, rank):
    """Read a parameter inside a transform, but outside all modules."""
    return vmap(grad(lambda row: (model(row) * model.head.bias).sum()))(x).square().mean()


LOSSES = [
    mean_flow,
    pulled_back,
    per_sample,
    slopes_alone,
    detached_slopes,
    untracked_slopes,
    jacobians,
    curvature,
    slope_of_a_slope,
    mapped,
    functionalized,
    of_other_values,
    of_its_own_values,
    by_its_own_values,
    with_a_weight_read,
]


@by_turns(loss_of=LOSSES)
def test_transforms_equal_plain_pytorch(group, ranks, loss_of):
    on(group, ranks)(agree_forward, Stack, loss_of)


class Forces(Stack):
    """Returns the slope of an energy, with torch.func inside its forward."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def energy(self, x):
        return super().forward(x * self.gain).square().sum()

    def forward(self, x):
        return vmap(grad(self.energy))(x) * self.gain.cos()


@every_size
def test_gradients_inside_a_forward(group, ranks):
    on(group, ranks)(agree, Forces)


def test_transform_on_one_rank_only(group):
    """Its units remain gathered, and it takes part in the gathers that the other rank needs."""
    group(2, transport="gloo")(steps_alike, on_one_rank, 20)


def steps_alike(world, loss_of, steps):
    agree(world, Stack, loss_of, steps=steps)


def kept_case(world):
    model = seeded(Stack)
    engine = sharded(model)
    block = model.blocks[1].up.weight
    for step in range(3):
        x = world.share(batch(step))
        with engine.full_parameters():
            pass
        model(x)
        assert at_rest(block)
        slopes = vmap(grad(lambda row: model(row).square().sum()))(x)
        assert not at_rest(block), "autograd has saved it"
        model(x)
        engine.backward(slopes.square().mean())
        assert at_rest(block)
        engine.step()
        out, back = vjp(model, x)
        engine.backward(out.square().mean(), retain_graph=True)
        assert not at_rest(block), "the graph was kept"
        engine.backward(back(out)[0].square().mean())
        assert at_rest(block)
        engine.step()
        vjp(model, x)
        engine.backward(model(x).square().mean())
        assert at_rest(block)
        vjp(model, x)
        engine.step()
        assert at_rest(block), "a step reshards units that no backward has reached"


@pytest.mark.parametrize("transport", ["gloo", "shared"])
def test_units_stay_whole_until_their_backward_has_ended(group, transport):
    group(2, transport=transport)(kept_case)


def copies_case(world):
    """Copies of unallocated parameters raise an error that names them. Training continues."""
    model, plain = seeded(Stack), seeded(Stack)
    engine = sharded(model)
    x = batch(0)
    detached = {name: p.detach() for name, p in model.named_parameters()}

    def loss(values, row):
        return functional_call(model, values, (row,)).square().sum()

    with pytest.raises(ParameterAccess, match=r"stem\.weight was read.*full_parameters"):
        vmap(grad(loss), in_dims=(None, 0))(detached, x)
    own = dict(model.named_parameters())
    with pytest.raises(ParameterAccess, match=r"weight was read.*full_parameters"):
        jvp(lambda values: functional_call(model, values, (x,)), (own,), (own,))
    with engine.full_parameters():
        detached = {name: p.detach().clone() for name, p in model.named_parameters()}
    slopes = vmap(grad(loss), in_dims=(None, 0))(detached, x)
    expected = {name: p.detach() for name, p in plain.named_parameters()}
    theirs = vmap(
        grad(lambda values, row: functional_call(plain, values, (row,)).square().sum()),
        in_dims=(None, 0),
    )(expected, x)
    for name, slope in slopes.items():
        torch.testing.assert_close(slope, theirs[name])
    train(world, engine, model, squares, range(2))


@pytest.mark.parametrize("ranks", ["2 gloo", "3 shared"])
def test_copies_without_values_are_refused_by_name(group, ranks):
    on(group, ranks)(copies_case)
