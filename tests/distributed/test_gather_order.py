"""Units of several engines, and statistics between units, when ranks need different ones.

No rank may wait in one gather for ranks that wait for it in another.
"""

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.errors import OrderError
from tests.distributed.sharded import (
    WIDTH,
    Block,
    Branches,
    adamw,
    batch,
    on,
    same_weights,
    seeded,
    sharded,
)

LIMIT = 30
"""Limit in seconds. A case takes one or two."""

over_gloo = pytest.mark.parametrize(
    "ranks", ["2 gloo", pytest.param("3 gloo", marks=pytest.mark.full), "3 shared"]
)


class Generator(Branches):
    """Branches whose output has the shape of their input."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(WIDTH, WIDTH)


class Inner(Branches):
    """Branches around another model, which is not one of its submodules."""

    def forward(self, x, which, around):
        x = self.stem(x)
        for number in which:
            x = self.blocks[number](x)
        return self.head(around(x) + x)


def some(step, rank):
    """Return different blocks in each step and on each rank."""
    return sorted({(rank + step) % 5, (2 * rank + step + 1) % 5})


def one_after_the_other(g, d, x, step, rank):
    return d(g(x, some(step, rank)), some(step + 2, rank)).square().mean()


def one_inside_of_the_other(g, d, x, step, rank):
    return d(x, some(step, rank), lambda y: g(y, some(step + 2, rank))).square().mean()


def twice_through_it(g, d, x, step, rank):
    made = g(x, some(step, rank))
    return (d(made, some(step, rank)) * d(x + made, some(step + 3, rank))).mean()


def of_two_engines(world, loss_of, kind, reverse):
    """Train each engine with losses that also depend on the other engine's model."""
    (g, d), (pg, pd) = [(seeded(Generator), seeded(kind, 4)) for _ in range(2)]
    made = [sharded(model) for model in ((d, g) if reverse else (g, d))]
    engines, optimizers = made[::-1] if reverse else made, [adamw(pg), adamw(pd)]
    for step in range(5):
        x = world.share(batch(step))
        for engine, optimizer in zip(engines, optimizers, strict=True):
            engine.backward(loss_of(g, d, x, step, world.rank), weight=len(x))
            engine.step()
            for each in optimizers:
                each.zero_grad()
            rows = batch(step)
            cuts = [len(rows) * rank // world.size for rank in range(world.size + 1)]
            for rank in range(world.size):
                part = rows[cuts[rank] : cuts[rank + 1]]
                loss = loss_of(pg, pd, part, step, rank) * (len(part) / len(rows))
                loss.backward()
            optimizer.step()
    for engine, model, plain in zip(engines, (g, d), (pg, pd), strict=True):
        same_weights(engine, model, plain)
    for engine in engines:
        engine.close()


OFTEN = [
    ("2 gloo", one_after_the_other, False),
    ("3 shared", one_after_the_other, True),
    ("2 gloo", one_inside_of_the_other, True),
    ("2 gloo", twice_through_it, False),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "loss_of", "kind", "reverse"),
    [
        pytest.param(ranks, loss_of, kind, reverse, marks=() if often else pytest.mark.full)
        for ranks in ("2 gloo", "3 gloo", "3 shared")
        for loss_of, kind in (
            (one_after_the_other, Branches),
            (one_inside_of_the_other, Inner),
            (twice_through_it, Branches),
        )
        for reverse in (False, True)
        for often in [(ranks, loss_of, reverse) in OFTEN]
    ],
)
def test_losses_through_two_engines(group, ranks, loss_of, kind, reverse):
    on(group, ranks)(of_two_engines, loss_of, kind, reverse, limit=LIMIT)


def gradients_by_hand(world):
    """Run the user's own backward pass through both models, and make one fail midway."""
    g, d = seeded(Generator), seeded(Branches, 4)
    pg, pd = seeded(Generator), seeded(Branches, 4)
    engines = [sharded(g), sharded(d)]
    for step in range(4):
        x, y = batch(step).requires_grad_(), batch(step).requires_grad_()
        loss = one_after_the_other(g, d, x, step, world.rank)
        if step == 1:
            handle = x.register_hook(fail)
            with pytest.raises(KeyError, match="by hand"):
                torch.autograd.grad(loss, x)
            handle.remove()
            continue
        (slope,) = torch.autograd.grad(loss, x)
        (wanted,) = torch.autograd.grad(one_after_the_other(pg, pd, y, step, world.rank), y)
        assert torch.allclose(slope, wanted)
    for engine in engines:
        engine.close()


def fail(grad):
    raise KeyError("by hand")


@over_gloo
def test_backwards_of_the_user(group, ranks):
    on(group, ranks)(gradients_by_hand, limit=LIMIT)


# -- BatchNorm over all ranks -----------------------------------------------------------------


class Normalised(nn.Module):
    """Blocks with a BatchNorm inside each and one around them. Each row uses one block."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(Block(), nn.BatchNorm1d(WIDTH), Block()) for _ in range(3)
        )
        self.last = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x, step):
        y = self.norm(x)
        chosen = (x[:, 0] * 10).long() % 3
        for number, block in enumerate(self.blocks):
            if len(rows := (chosen == (number + step) % 3).nonzero().flatten()):
                y = y.index_add(0, rows, block(y[rows]))
        return self.head(self.last(y))


def sgd(model):
    """Return SGD. With AdamW, rounding errors in biases before a BatchNorm would matter."""
    return torch.optim.SGD(model.parameters(), lr=0.1)


def rows_by_rank(step):
    """Return six rows for each of three ranks. Some ranks use only one block."""
    x = batch(step, rows=18)
    x[:6, 0], x[6:12, 0], x[12:, 0] = 0.05, 0.15, torch.tensor([0.05, 0.15, 0.25] * 2)
    return x


def normalised(world):
    """Check that ranks which reach a BatchNorm get the statistics of a single process."""
    model, plain = seeded(Normalised), seeded(Normalised)
    engine, optimizer = sharded(model, optimizer=sgd, sync_batch_norm=True), sgd(plain)
    for step in range(4):
        x = rows_by_rank(step)
        engine.backward(model(world.share(x), step).square().mean())
        engine.step()
        optimizer.zero_grad()
        plain(x, step).square().mean().backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            model(world.share(x), step)
        model.train()
    same_weights(engine, model, plain)
    engine.close()


def test_a_batch_norm_that_some_ranks_skip(group):
    on(group, "3 gloo")(normalised, limit=LIMIT)


class Crossed(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x, order):
        for number in order:
            x = self.norms[number](x)
        return self.head(x)


def crossed(world, orders):
    model = seeded(Crossed)
    engine = sharded(model, sync_batch_norm=True)
    try:
        engine.backward(model(batch(world.rank), orders[world.rank]).square().mean())
    finally:
        engine.close()


@pytest.mark.parametrize(
    "orders",
    [
        [(0, 1), (1, 0)],
        [(0,), (0, 0)],
        [(1, 0), (0,)],
    ],
)
def test_batch_norms_that_ranks_come_to_in_other_orders_are_refused(group, orders):
    for name, message in group(2, transport="gloo").errors(crossed, orders, limit=LIMIT):
        assert name == OrderError.__name__
        assert "in the same order" in message


def crossed_whole(world, zero):
    """Run the same case with replicated parameters, for which no gather order exists."""
    model = seeded(Crossed)
    engine = sw.Engine(
        model, torch.optim.SGD(model.parameters(), 0.1), zero=zero, sync_batch_norm=True
    )
    order = [(0, 1), (1, 0)][world.rank]
    try:
        engine.backward(model(batch(world.rank), order).square().mean())
    finally:
        engine.close()


@pytest.mark.parametrize("zero", [0, 2])
def test_batch_norms_in_other_orders_are_refused_in_every_row(group, zero):
    for name, message in group(2, transport="gloo").errors(crossed_whole, zero, limit=LIMIT):
        assert name == OrderError.__name__
        assert "in the same order" in message


def other_backward(world):
    """Run two forward passes, and use a different one in the loss of each rank."""
    model = seeded(Crossed)
    engine = sharded(model, sync_batch_norm=True)
    try:
        outs = [model(batch(number), (0, 1)) for number in range(2)]
        engine.backward(outs[world.rank].square().mean())
    finally:
        engine.close()


def test_backwards_of_other_forwards_are_refused(group):
    for name, message in group(2, transport="gloo").errors(other_backward, limit=LIMIT):
        assert name == OrderError.__name__
        assert "different forwards" in message


def uneven_blocks(world):
    """Run the models of two engines in turn on a single rank, inside both blocks."""
    models, plains = [[seeded(Branches), seeded(Branches, 4)] for _ in range(2)]
    engines = [sharded(model) for model in models]
    with engines[0].uneven(), engines[1].uneven(), torch.no_grad():
        for turn in range(3 if world.rank == 0 else 0):
            for model, plain in zip(models, plains, strict=True):
                assert torch.equal(model(batch(turn), [turn]), plain(batch(turn), [turn]))
    for engine, model in zip(engines, models, strict=True):
        engine.backward(model(world.share(batch(0)), [world.rank]).mean())
        engine.step()
        engine.close()


@over_gloo
def test_uneven_forwards_of_two_engines(group, ranks):
    on(group, ranks)(uneven_blocks, limit=LIMIT)


def made_and_closed(world):
    """Create and close engines while other engines continue to train."""
    model = seeded(Branches)
    engine = sharded(model)
    for step in range(4):
        engine.backward(model(batch(step), some(step, world.rank)).mean())
        engine.step()
        other = seeded(Branches, step)
        beside = sw.Engine(other, adamw(other), zero=3)
        beside.backward(other(model(batch(step), [0]) @ torch.ones(2, WIDTH).double(), [1]).mean())
        beside.step()
        beside.close()
    engine.close()


@over_gloo
def test_engines_that_come_and_go(group, ranks):
    on(group, ranks)(made_and_closed, limit=LIMIT)
