"""Pipelines in unusual programs: checkpoints, autograd functions, buffers that are views."""

import re
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.errors import UsageError


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8, affine=False)

    def forward(self, x):
        return x + torch.tanh(self.linear(self.norm(x)))


class Blocks(nn.Module):
    """Runs its blocks in the way that `how` names."""

    def __init__(self, how="plain"):
        super().__init__()
        self.how = how
        self.stem = nn.Linear(8, 8)
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        x = self.stem(x)
        if self.how == "all as one":
            x = checkpoint(self._through, x, use_reentrant=False)
        elif self.how == "function":
            x = self._through(_Reversed.apply(x))
        elif self.how == "plain":
            x = self._through(x)
        else:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=self.how == "reentrant")
        return self.head(x)

    def _through(self, x):
        for block in self.blocks:
            x = block(x) * 1.5
        return x


class _Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -grad


def blocks(how="plain"):
    torch.manual_seed(3)
    return Blocks(how).double(), torch.randn(8, 8, dtype=torch.double)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def plain_losses(how, micros):
    """Return the losses of a single process for a batch in this number of micro-batches."""
    model, x = blocks(how)
    optimizer, losses = sgd(model), []
    for _ in range(3):
        each = [model(part).square().mean() / micros for part in x.chunk(micros)]
        sum(each).backward()
        losses.append(sum(each).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def trains(world, how, in_turn, options):
    model, x = blocks(how)
    engine = sw.Engine(model, sgd(model), microbatches=4, **options)
    losses = []
    for _ in range(3):
        if in_turn:
            engine.backward(model(x).square().mean())
        else:
            engine.forward_backward(lambda x: model(x).square().mean(), x)
        losses.append(engine.step().loss)
    engine.close()
    return losses


CHECKPOINTED = [
    (2, "each", False, {}),
    (4, "each", False, {"schedule": "1f1b", "zero": 1}),
    (2, "each", False, {"schedule": "interleaved"}),
    (2, "each", False, {"zero": 3, "schedule": "gpipe"}),
    (2, "each", False, {"activations": "recomputed"}),
    (2, "all as one", False, {}),
    (2, "all as one", False, {"zero": 3}),
    (2, "each", True, {}),
    (2, "all as one", True, {}),
]


@pytest.mark.parametrize(("size", "how", "in_turn", "options"), CHECKPOINTED)
def test_checkpoints_around_layers(group, size, how, in_turn, options):
    wanted = plain_losses(how, 1 if in_turn else 4)
    for losses in group(size, pipeline=size)(trains, how, in_turn, options):
        assert losses == pytest.approx(wanted, rel=1e-8)


class Dropped(nn.Sequential):
    """Two layers that drop half of their input, and record the rest."""

    def __init__(self, checkpointed):
        super().__init__(*(nn.Sequential(nn.Dropout(0.5), nn.Linear(8, 8)) for _ in range(2)))
        self.checkpointed = checkpointed

    def forward(self, x):
        for layer in self:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return x


def square_of(model, x):
    return model(x).square().mean()


def draws(world, in_turn):
    norms = []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        model = Dropped(checkpointed).double()
        engine = sw.Engine(model, sgd(model), microbatches=2)
        x = torch.ones(4, 8, dtype=torch.double)
        for _ in range(2):
            if in_turn:
                engine.backward(square_of(model, x))
            else:
                engine.forward_backward(partial(square_of, model), x)
            norms.append(engine.step().grad_norm)
        engine.close()
        world.engines -= 1  # the next engine draws the same numbers as this one
    return norms[:2], norms[2:]


@pytest.mark.parametrize("in_turn", [False, True])
def test_recomputation_repeats_random_numbers(group, in_turn):
    for plain, checkpointed in group(2, pipeline=2)(draws, in_turn):
        assert checkpointed == pytest.approx(plain, rel=1e-12)


def refused(world, how, in_turn):
    model, x = blocks("plain" if how in ("penalty", "bare") else how)
    engine = sw.Engine(model, sgd(model), microbatches=2)

    def loss_of(x):
        if how != "penalty":
            return model(x).square().mean()
        x = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return grad.square().mean()

    try:
        if how == "bare":
            loss_of(x).backward()
        elif in_turn:
            engine.backward(loss_of(x))
        else:
            engine.forward_backward(loss_of, x)
    except UsageError as error:
        return str(error)
    finally:
        engine.close()
    return "taken"


@pytest.mark.parametrize(
    ("how", "in_turn", "hint"),
    [
        ("reentrant", False, "autograd.Function.*use_reentrant=False"),
        ("reentrant", True, "autograd.Function.*use_reentrant=False"),
        ("function", False, "autograd.Function.*in the forward of one of the model's layers"),
        ("penalty", False, "without --pipeline.*gradient penalty"),
        ("penalty", True, "without --pipeline.*gradient penalty"),
        ("bare", True, "engine.backward\\(loss\\)"),
    ],
)
def test_rejects_own_passes_through_the_graph(group, how, in_turn, hint):
    for said in group(2, pipeline=2)(refused, how, in_turn):
        assert re.search(hint, said), said


class Views(nn.Module):
    """Buffers that share memory, in ways that a plain copy cannot reproduce."""

    def __init__(self, plus):
        super().__init__()
        wave = torch.arange(40.0).view(1, 5, 8) + plus
        self.register_buffer("swapped", wave.transpose(0, 1))
        self.register_buffer("turned", torch.arange(12.0).view(3, 4).T + plus)
        self.register_buffer("repeated", torch.ones(1, 8).mul(plus).expand(4, 8))
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(x + self.swapped[:1, 0]) * self.repeated.mean()


def has_views(world, folder):
    torch.manual_seed(0)
    model = nn.Sequential(Views(1 + world.rank), Views(3 + world.rank))
    engine = sw.Engine(model, sgd(model))
    engine.forward_backward(lambda x: model(x).square().mean(), torch.ones(4, 8))
    engine.step()
    path = engine.save(folder)
    engine.export(folder / "whole.pt")
    engine.load(path)
    with engine.full_parameters():
        found = {name: value.clone() for name, value in model.named_buffers()}
    engine.close()
    return found, {name: value.clone() for name, value in model.named_buffers()}


@pytest.mark.parametrize("pipeline", [1, 2])
def test_buffers_that_are_views(group, tmp_path, pipeline):
    model = nn.Sequential(Views(1), Views(3))
    wanted = dict(model.named_buffers())
    for each in group(2, pipeline=pipeline)(has_views, tmp_path):
        for found in each:
            assert all(torch.equal(found[name], value) for name, value in wanted.items())
    written = torch.load(tmp_path / "whole.pt")
    assert all(torch.equal(written[name], value) for name, value in wanted.items())


class Inside(nn.Module):
    """A layer that contains a checkpoint, or that starts with in-place operations."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.linear, self.out = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        if self.how == "in place":
            return self.out(self.linear(x.mul_(2.0).relu_()))
        return self.out(checkpoint(lambda x: self.linear(x).tanh(), x, use_reentrant=True))


def inside(how):
    torch.manual_seed(3)
    layers = [Inside(how) for _ in range(4)]
    return nn.Sequential(nn.Linear(8, 8), *layers, nn.Linear(8, 1)).double()


def inside_case(world, how, in_turn):
    """Return losses of a pipeline and of plain PyTorch."""
    model, reference = inside(how), inside(how)
    x = torch.randn(8, 8, dtype=torch.double)
    engine, optimizer = sw.Engine(model, sgd(model)), sgd(reference)
    for _ in range(3):
        if in_turn:
            engine.backward(model(world.share(x)).square().mean())
        else:
            engine.forward_backward(lambda x: model(x).square().mean(), world.share(x))
        loss = reference(x.clone()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert engine.step().loss == pytest.approx(loss.item(), rel=1e-9)


@pytest.mark.parametrize("in_turn", [False, True])
def test_stage_begins_with_an_operation_in_place(group, in_turn):
    group(2, pipeline=2)(inside_case, "in place", in_turn)


def test_in_place_operations_in_split_backwards(group):
    group(2, pipeline=2, schedule="zero-bubble")(inside_case, "in place", False)


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_reentrant_checkpoint_in_a_layer(group, schedule):
    group(2, pipeline=2, schedule=schedule)(inside_case, "checkpoint", False)
