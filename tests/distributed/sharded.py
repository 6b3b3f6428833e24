"""Helpers for tests of sharded parameters: small models with units, and plain PyTorch."""

from itertools import product

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.errors import ParameterAccess
from tests.tables import covering

SIZES = ["1 gloo", "2 gloo", "3 gloo", "3 shared"]
FULL = pytest.mark.full
RANKS = [pytest.param(ranks, marks=FULL if ranks == "3 gloo" else ()) for ranks in SIZES]
"""Numbers of ranks: two over Gloo and three in shared memory show nearly all errors."""
every_size = pytest.mark.parametrize("ranks", RANKS)
"""Over Gloo all ranks gather units together. In shared memory every bucket is always complete."""

TURNS = ("2 gloo", "3 shared")


def by_turns(**values):
    """Parametrize a test by `ranks` and by the product of `values`.

    `make test` runs each value at least once: over Gloo, and the next one in shared memory.
    """
    cases = covering(product(TURNS, *values.values()))
    others = product([size for size in SIZES if size not in TURNS], *values.values())
    cases += [pytest.param(*case, marks=FULL) for case in others]
    return pytest.mark.parametrize(("ranks", *values), cases)


def on(group, ranks):
    """Return the warm group of `ranks`, one of RANKS."""
    size, transport = ranks.split()
    return group(int(size), transport=transport)


WIDTH = 6


class FailingBackward(torch.autograd.Function):
    """Does nothing in forward, and raises KeyError in backward."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise KeyError("in backward")


class Block(nn.Module):
    """A unit: two layers and a residual connection."""

    def __init__(self, width=WIDTH):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).tanh())


class Stack(nn.Module):
    """Blocks between two layers that are the rest of the model."""

    def __init__(self, blocks=3, width=WIDTH, block=Block):
        super().__init__()
        self.stem = nn.Linear(width, width)
        self.blocks = nn.ModuleList(block() for _ in range(blocks))
        self.head = nn.Linear(width, 2)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Branches(nn.Module):
    """A model that runs the blocks `which`, in order; each forward may choose them."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(5))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x, which, untrained=()):
        x = self.stem(x)
        for number in which:
            with torch.set_grad_enabled(torch.is_grad_enabled() and number not in untrained):
                x = self.blocks[number](x)
        return self.head(x)


def seeded(make, seed=3):
    torch.manual_seed(seed)
    return make().double()


def batch(step, rows=7, width=WIDTH):
    draw = torch.Generator().manual_seed(1000 + step)
    return torch.randn(rows, width, generator=draw, dtype=torch.float64)


def squares(model, x, step, rank):
    del step, rank
    return model(x).square().mean()


def adamw(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def sharded(model, *, optimizer=adamw, **settings):
    """Return an engine with sharded parameters and small buckets."""
    return sw.Engine(model, optimizer(model), zero=3, bucket_mb=0.001, **settings)


def train(world, engine, model, loss_of, steps):
    """Train on this rank's rows; return by step the loss and the norm of the gradient."""
    told = []
    for step in steps:
        x = world.share(batch(step))
        engine.backward(loss_of(model, x, step, world.rank), weight=len(x))
        stats = engine.step()
        told.append((stats.loss, stats.grad_norm))
    return told


def train_plain(model, optimizer, loss_of, steps, *, size):
    """Train in a single process, calling `loss_of` for each rank's rows."""
    told = []
    for step in steps:
        optimizer.zero_grad()
        rows = batch(step)
        cuts = [len(rows) * rank // size for rank in range(size + 1)]
        total = 0.0
        for rank in range(size):
            part = rows[cuts[rank] : cuts[rank + 1]]
            loss = loss_of(model, part, step, rank) * (len(part) / len(rows))
            loss.backward()
            total += loss.item()
        trained = [p for group in optimizer.param_groups for p in group["params"]]
        norm = torch.nn.utils.clip_grad_norm_(trained, float("inf"))
        optimizer.step()
        told.append((total, norm.item()))
    return told


def train_alike(world, engine, model, plain, optimizer, steps, loss_of=squares):
    """Train both, and assert that losses and norms are equal."""
    mine = train(world, engine, model, loss_of, steps)
    theirs = train_plain(plain, optimizer, loss_of, steps, size=world.size)
    assert same_figures(mine, theirs), f"{mine} {theirs}"


def agree(world, make, loss_of=squares, *, steps=3, optimizer=adamw, **settings):
    """Train `make()` sharded and plainly; assert that losses, norms and tensors are equal.

    In the first step the order of gathers is found, the second one follows it, and the third one
    starts from states that this has changed. Returns the names of the units.
    """
    model, plain = seeded(make), seeded(make)
    engine = sharded(model, optimizer=optimizer, **settings)
    train_alike(world, engine, model, plain, optimizer(plain), range(steps), loss_of)
    same_weights(engine, model, plain)
    return units_of(engine)


def same_figures(mine, theirs, tolerance=1e-9):
    return torch.allclose(torch.tensor(mine), torch.tensor(theirs), rtol=tolerance, atol=1e-14)


def same_weights(engine, model, plain, tolerance=1e-9):
    """Assert that full parameters and buffers of `model` and `plain` are equal."""
    with engine.full_parameters():
        mine = {name: value.clone() for name, value in model.state_dict().items()}
    theirs = plain.state_dict()
    assert list(mine) == list(theirs)
    for name, value in mine.items():
        assert torch.allclose(value, theirs[name], rtol=tolerance, atol=tolerance * 1e-2), (
            f"{name}: {(value - theirs[name]).abs().max()}"
        )
    assert all(at_rest(p) for p in model.parameters() if p.numel())


def at_rest(parameter):
    if not (parameter.is_floating_point() or parameter.is_complex()):
        return True  # integers have no NaN, so they stay whole
    try:
        parameter.sum()
    except ParameterAccess:
        return True
    return False


def units_of(engine):
    """Return the names of the engine's units."""
    return [unit.name for unit in engine._states.shown.residency.units]


def buffers_made(engine):
    """Return the number of buffers allocated for gathered buckets, or 0 if ranks share memory."""
    return getattr(engine._states.shown.residency._gathers, "allocated", 0)


def gathered(engine):
    """Return whether buckets are gathered; they are not if ranks share memory."""
    return engine._states.shown.residency._gathers.collective
