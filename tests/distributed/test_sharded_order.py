"""Sharded parameters if ranks or steps need different units: all ranks gather in the same order."""

import random

import pytest
import torch

from shardwise.comm import Gloo
from shardwise.comm.agreed_order import SETTLED
from shardwise.errors import OrderError
from tests.distributed.sharded import (
    Branches,
    FailingBackward,
    Stack,
    adamw,
    agree,
    at_rest,
    batch,
    buffers_made,
    by_turns,
    every_size,
    gathered,
    on,
    same_weights,
    seeded,
    sharded,
    squares,
    train,
    train_alike,
    train_plain,
)


class Experts(Branches):
    """Each row goes to one expert; an expert without rows does not run."""

    def forward(self, x, offset):
        x = self.stem(x)
        chosen = ((x.detach().sum(1) * 7).floor().long() + offset) % 5
        out = torch.zeros_like(x)
        for number in chosen.unique().tolist():
            rows = (chosen == number).nonzero().flatten()
            out = out.index_add(0, rows, self.blocks[number](x[rows]))
        return self.head(x + out)


def by_rank_and_step(model, x, step, rank):
    return model(x, sorted({(rank + step) % 4, (2 * rank + step) % 5})).square().mean()


def no_rank_at_first(model, x, step, rank):
    """No rank uses blocks 1 and 3 in the first two steps."""
    later = [[1], [3], [1, 3], [0, 1, 2, 3, 4]]
    return model(x, [0, 2] if step < 2 else later[(step + rank) % 4]).square().mean()


def some_take_nothing(model, x, step, rank):
    return model(x, [] if (rank + step) % 2 else [0, 1, 4]).square().mean()


def skipped_in_backward(model, x, step, rank):
    """Some ranks run blocks without gradient."""
    untrained = [[], [0, 1], [0], [0, 1, 2, 3, 4]][(step + rank) % 4]
    return model(x, [0, 1, 2] if rank else [0, 3, 4], untrained).square().mean()


def detached_in_parts(model, x, step, rank):
    """Backward reaches only the last blocks, on some ranks in some steps."""
    x = model.blocks[0](model.blocks[1](x))
    return model(x.detach() if (rank + step) % 2 else x, [2, 3]).square().mean()


def routed(model, x, step, rank):
    return model(x, step).square().mean()


@by_turns(
    loss_of=[
        by_rank_and_step,
        no_rank_at_first,
        some_take_nothing,
        skipped_in_backward,
        detached_in_parts,
    ]
)
def test_branches(group, ranks, loss_of):
    on(group, ranks)(branches_agree, loss_of)


def branches_agree(world, loss_of):
    agree(world, Branches, loss_of, steps=7)


@every_size
def test_experts(group, ranks):
    on(group, ranks)(experts_agree)


def experts_agree(world):
    agree(world, Experts, routed, steps=6)


# -- several forwards, then backwards ---------------------------------------------------------


def drawn(seed, *, in_order):
    """Draw some blocks, different ones for each forward."""
    draw = random.Random(seed)
    some = draw.sample(range(5), draw.randint(1, 4))
    return sorted(some) if in_order else some


def two_losses(model, x, step, rank, *, in_order):
    seed = 100 * step + 10 * rank
    return [model(x, drawn(seed + n, in_order=in_order)).square().mean() for n in range(2)]


def one_backward(world, in_order):
    """Run two forward passes with different branches, then one backward pass."""
    agree(
        world,
        Branches,
        lambda *given: sum(two_losses(*given, in_order=in_order)),
        steps=8,
    )


def two_backwards(world, in_order):
    """Run two forward passes with different branches, then a backward pass for each."""
    model, plain = seeded(Branches), seeded(Branches)
    engine, optimizer = sharded(model), adamw(plain)
    for step in range(8):
        losses = two_losses(model, batch(step), step, world.rank, in_order=in_order)
        engine.backward(losses[0], last=False)
        engine.backward(losses[1])
        engine.step()
        optimizer.zero_grad()
        for rank in range(world.size):
            losses = two_losses(plain, batch(step), step, rank, in_order=in_order)
            (sum(losses) / (2 * world.size)).backward()
        optimizer.step()
    same_weights(engine, model, plain)


@by_turns(in_order=[True, False], case=[one_backward, two_backwards])
def test_two_forwards(group, ranks, case, in_order):
    on(group, ranks)(case, in_order)


def asked(world):
    """Ranks ask each other for the order in the first passes only, because all units are needed."""
    model = seeded(Stack)
    engine = sharded(model)
    order = engine.world.gather_order._order
    asks, agree_on = [], order._agree
    order._agree = lambda wanted: asks.append(wanted) or agree_on(wanted)
    train(world, engine, model, squares, range(SETTLED + 1))
    first = len(asks)
    for accumulated in (False, True, False):
        if accumulated:
            x = batch(0)
            engine.backward(squares(model, x, 0, 0), weight=len(x), same_items=False, last=False)
        train(world, engine, model, squares, range(2))
    assert len(asks) == first or world.size == 1
    assert bool(first) == gathered(engine)


@every_size
def test_ranks_agree_on_an_order_once(group, ranks):
    on(group, ranks)(asked)


# -- forwards that nobody trains --------------------------------------------------------------


def evaluation_between(world):
    model, plain = seeded(Branches), seeded(Branches)
    engine, optimizer = sharded(model), adamw(plain)
    x = batch(77)
    for step in range(4):
        train_alike(world, engine, model, plain, optimizer, [step], by_rank_and_step)
        # Other ranks take other branches, which change from step to step.
        which = [(step + world.rank) % 5]
        model.eval()
        with torch.no_grad():
            assert torch.allclose(model(x, which), plain(x, which))
        with torch.inference_mode():
            assert torch.allclose(model(x, which), plain(x, which))
            assert torch.allclose(model.blocks[step](x), plain.blocks[step](x))
        model.train()
        if step == 2:
            model(x, which)  # with gradients that are not used
        assert all(at_rest(b.up.weight) for b in model.blocks)
    same_weights(engine, model, plain)


def evaluation_before_backward(world):
    """Run a forward without gradient between forward and backward."""

    def loss_of(model, x, step, rank):
        out = model(x) @ model.head.weight
        with torch.no_grad():
            model.blocks[step % 3](x)
            scale = model(x).abs().max()
        return (out / scale).square().mean()

    agree(world, Stack, loss_of)


def uneven_generation(world):
    """Each rank runs any number of forward passes between training steps, and rank 0 a few more."""
    model, plain = seeded(Branches), seeded(Branches)
    engine, optimizer = sharded(model), adamw(plain)
    for step in range(4):
        with engine.uneven(), torch.no_grad():
            x = y = batch(5, 2)
            for turn in range(1 + (3 * world.rank + step) % 4):
                which = [(turn + world.rank) % 5]
                x, y = x + model(x, which).sum(), y + plain(y, which).sum()
                assert torch.allclose(x, y)
        if step == 2:
            with engine.uneven():
                if world.rank == 0:
                    rows = batch(9).requires_grad_()
                    model(rows, [1, 2])
                    (slope,) = torch.autograd.grad(model(rows, [1, 3]).sum(), rows)
                    (wanted,) = torch.autograd.grad(plain(rows, [1, 3]).sum(), rows)
                    assert torch.allclose(slope, wanted)
        train_alike(world, engine, model, plain, optimizer, [step], by_rank_and_step)
    same_weights(engine, model, plain)


def uneven_amid_a_step(world):
    """Run different numbers of forward passes with gradients between two micro-batches."""
    model, plain = seeded(Stack), seeded(Stack)
    engine, optimizer = sharded(model), adamw(plain)
    for step in range(3):
        x = world.share(batch(step))
        with engine.uneven():
            for _ in range(world.rank):
                torch.autograd.grad(model(batch(9)).sum(), model.blocks[0].norm.bias)
        engine.backward(squares(model, x, step, world.rank), weight=len(x))
        engine.step()
        train_plain(plain, optimizer, squares, [step], size=world.size)
    same_weights(engine, model, plain)


def uneven_failure(world):
    """A rank that fails inside the block leaves the others intact."""
    model = seeded(Stack)
    engine = sharded(model)
    train(world, engine, model, squares, range(2))
    failed = False
    try:
        with engine.uneven(), torch.no_grad():
            model(batch(1))
            if world.rank == world.size - 1:
                raise KeyError("mine")
            model(batch(1))
    except KeyError:
        failed = True
    assert failed == (world.rank == world.size - 1)
    train(world, engine, model, squares, range(2))


CASES = [
    evaluation_between,
    evaluation_before_backward,
    uneven_generation,
    uneven_amid_a_step,
    uneven_failure,
]


@by_turns(case=CASES)
def test_forwards_without_training(group, ranks, case):
    on(group, ranks)(case)


# -- failures ---------------------------------------------------------------------------------


class Fragile(Stack):
    """Fails at a block on request. Its blocks run in a different order from their registration."""

    fails_at = None

    def forward(self, x):
        x = self.stem(x)
        for number in (2, 0, 1):
            if number == self.fails_at:
                raise KeyError(number)
            x = self.blocks[number](x)
        return self.head(x)


def failure_then_training(world, at, failing):
    """Forward fails at block `at`, in the first and in a later step; then training continues."""
    model, plain = seeded(Fragile), seeded(Fragile)
    engine, optimizer = sharded(model), adamw(plain)
    for step in range(4):
        if step in (0, 2):
            model.fails_at = at if world.rank in failing else None
            try:
                model(batch(step))
            except KeyError:
                assert world.rank in failing
            with torch.no_grad():
                try:
                    model(batch(step))
                except KeyError:
                    assert world.rank in failing
            model.fails_at = None
            assert at_rest(model.blocks[0].up.weight)
        train_alike(world, engine, model, plain, optimizer, [step])
    same_weights(engine, model, plain)


@by_turns(at=[2, 1], failing=[(0, 1, 2), (0,)])
def test_failed_forward(group, ranks, at, failing):
    on(group, ranks)(failure_then_training, at, failing)


def failed_backward(world):
    """Backward fails on all ranks, started by the engine or the user; then training continues."""
    model, plain = seeded(Stack), seeded(Stack)
    engine, optimizer = sharded(model), adamw(plain)
    for step in range(4):
        x = batch(step).requires_grad_()
        if step in (0, 2):
            out = model.head(model.blocks[1](FailingBackward.apply(model.blocks[0](x))))
            with pytest.raises(KeyError, match="in backward"):
                engine.backward(out.sum())
        else:
            out = model.head(model.blocks[1](FailingBackward.apply(model.blocks[0](x))))
            with pytest.raises(KeyError, match="in backward"):
                torch.autograd.grad(out.sum(), x)
        train_alike(world, engine, model, plain, optimizer, [step])
    same_weights(engine, model, plain)


@every_size
def test_failed_backward(group, ranks):
    on(group, ranks)(failed_backward)


# -- another order ----------------------------------------------------------------------------


def another_order(world):
    """Units that all ranks gather in a fixed order cannot be needed in a different order."""
    model = seeded(Branches)
    engine = sharded(model)
    x = batch(0)
    for _ in range(SETTLED + 1):
        engine.backward(model(x, range(5)).square().mean())
        engine.step()
    if world.size == 1:
        model(x, [2, 0, 1])
        return
    with pytest.raises(OrderError, match=r"blocks\.0 is needed after blocks\.2.*engine\.uneven"):
        model(x, [2, 0, 1])
    engine.backward(model(x, range(5)).square().mean())
    engine.step()
    with engine.uneven(), torch.no_grad():
        model(x, [2, 0, 1])


def test_refuses_another_order(group):
    on(group, "2 gloo")(another_order)
    on(group, "3 gloo")(another_order)


def skipping_keeps_buffers(world):
    model = seeded(Branches)
    engine = sharded(model)
    train(world, engine, model, by_rank_and_step, range(8))
    made = buffers_made(engine)
    train(world, engine, model, by_rank_and_step, range(12))
    assert buffers_made(engine) == made


@every_size
def test_skipping_allocates_nothing(group, ranks):
    on(group, ranks)(skipping_keeps_buffers)


def starts_case(world):
    """Collectives of gathers and of gradients start in one order on all ranks.

    NCCL's communicators need that. The test observes it over Gloo.
    """
    log = []
    usual = {name: getattr(Gloo, name) for name in ("all_gather", "reduce_scatter", "gather_rows")}

    def spy(name, verb):
        def call(self, buffer, *args, **options):
            log.append((self.messages._group is not None, name, buffer.numel()))
            return verb(self, buffer, *args, **options)

        return call

    for name, verb in usual.items():
        setattr(Gloo, name, spy(name, verb))
    try:
        engine = sharded(model := seeded(Branches))
        for step in range(6):
            log.clear()
            which = range(5) if step < 3 or world.rank == 0 else [0, 4]
            engine.backward(model(world.share(batch(step)), which).square().mean())
            engine.step()
            first, *others = world.gather(list(log))
            assert all(other == first for other in others), (first, others)
        engine.close()
    finally:
        for name, verb in usual.items():
            setattr(Gloo, name, verb)


def test_collectives_start_in_one_order_for_all_branches(group):
    group(2, transport="gloo")(starts_case)
