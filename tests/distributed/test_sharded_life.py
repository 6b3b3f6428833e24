"""Sharded parameters over the life of an engine: changes during training, averages, precision."""

import copy
import gc
import os
import time

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.errors import UsageError
from tests.distributed.sharded import (
    WIDTH,
    Stack,
    adamw,
    at_rest,
    batch,
    by_turns,
    every_size,
    on,
    same_figures,
    same_weights,
    seeded,
    sharded,
    squares,
    train,
    train_alike,
    train_plain,
)


def unfrozen_on_the_way(world):
    """A block is frozen after some steps, and trained again later."""
    model, plain = seeded(Stack), seeded(Stack)
    engine, optimizer = sharded(model), adamw(plain)
    for step in range(6):
        if step in (2, 4):
            for each in (model, plain):
                each.blocks[1].requires_grad_(step == 4)
            optimizer.zero_grad()
        train_alike(world, engine, model, plain, optimizer, [step])
    same_weights(engine, model, plain)


def gan_case(world, zero):
    """The discriminator is frozen while the generator trains, in every step."""
    models, plains = ([seeded(Stack, 1), seeded(Narrow, 2)] for _ in range(2))
    engines = [sw.Engine(m, adamw(m), zero=zero, bucket_mb=0.001) for m in models]
    optimizers = [adamw(plain) for plain in plains]
    laid = engines[1]._states
    for step in range(4):
        for judge in (models[1], plains[1]):
            judge.requires_grad_(True)
        x = batch(step)
        mine = world.share(x)
        engines[1].backward(judged(*models, mine, detached=True))
        engines[1].step()
        optimizers[1].zero_grad()
        judged(*plains, x, detached=True).backward()
        optimizers[1].step()
        for judge in (models[1], plains[1]):
            judge.requires_grad_(False)
        engines[0].backward(judged(*models, mine, detached=False))
        engines[0].step()
        optimizers[0].zero_grad()
        judged(*plains, x, detached=False).backward()
        optimizers[0].step()
    assert engines[1]._states is laid, "freezing must not lay out the states again"
    for engine, model, plain in zip(engines, models, plains, strict=True):
        with engine.full_parameters():
            for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-10)
        engine.close()


class Narrow(Stack):
    """Takes the output of a Stack."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(2, WIDTH)


def judged(generator, judge, x, *, detached):
    made = generator(x)
    return judge(made.detach()).square().mean() if detached else judge(made).mean()


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_model_frozen_for_a_part_of_each_step(group, zero):
    group(2)(gan_case, zero)


def closed_case(world):
    """Closed engines leave no sockets and no threads."""
    counts = []
    for _ in range(4):
        model = seeded(Stack)
        engine = sharded(model)
        engine.backward(model(world.share(batch(0))).square().mean())
        engine.step()
        engine.close()
        del engine, model
        gc.collect()
        world.barrier()
        counts.append(held())
    until = time.monotonic() + 5
    # A joined thread is listed for a moment longer; fewer than at first is no leak.
    while any(now > first for now, first in zip(counts[-1], counts[0], strict=True)):
        assert time.monotonic() < until, counts
        time.sleep(0.05)
        counts.append(held())


def held():
    """Return the number of open files and threads of this process."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


@pytest.mark.parametrize("transport", ["shared", "gloo"])
def test_closed_engines_leave_nothing(group, transport):
    group(2, transport=transport)(closed_case)


def group_added(world):
    """Add a parameter group during training, for parts that were in no optimizer."""

    def first_parts(model):
        model.blocks[2].requires_grad_(False)
        return adamw(model)

    model, plain = seeded(Stack), seeded(Stack)
    engine, optimizer = sharded(model, optimizer=first_parts), first_parts(plain)
    for step in range(5):
        if step == 2:
            for each, trainer in ((model, engine._spec.optimizers[0]), (plain, optimizer)):
                each.blocks[2].requires_grad_(True)
                trainer.add_param_group({"params": [*each.blocks[2].parameters()], "lr": 3e-2})
        train_alike(world, engine, model, plain, optimizer, [step])
    same_weights(engine, model, plain)


def unfrozen_then(world, then, folder):
    """Unfreeze parameters, and do something else before the next forward."""

    def first_parts(model):
        model.blocks[0].requires_grad_(False)
        return torch.optim.AdamW(model.parameters(), lr=1e-2)

    model, plain = seeded(Stack), seeded(Stack)
    engine = sharded(model, optimizer=first_parts, ema_decay=0.9 if then == "average" else None)
    optimizer = first_parts(plain)
    for step in range(4):
        if step == 2:
            for each in (model, plain):
                each.blocks[0].requires_grad_(True)
            if then == "save":
                engine.save(folder)
            elif then == "evaluate":
                with torch.no_grad():
                    model(batch(0))
            elif then == "average":
                with engine.ema(), torch.no_grad():
                    model(batch(0))
            else:
                engine.export(f"{folder}/{then}.safetensors")
        train_alike(world, engine, model, plain, optimizer, [step])
    same_weights(engine, model, plain)


@by_turns(then=["save", "evaluate", "average", "export"])
def test_unfrozen_then(group, ranks, then, tmp_path):
    on(group, ranks)(unfrozen_then, then, str(tmp_path))


def unfrozen_too_late(world):
    model = seeded(Stack)
    model.blocks[0].requires_grad_(False)
    engine = sharded(model, optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1))
    loss = squares(model, batch(0), 0, 0)
    model.blocks[0].requires_grad_(True)
    with pytest.raises(UsageError, match=r"between a forward and engine\.backward"):
        engine.backward(loss)


@every_size
def test_unfrozen_too_late(group, ranks):
    on(group, ranks)(unfrozen_too_late)


def outside_of_the_models(world):
    """A parameter that only the optimizer holds is always available in full."""

    def with_scale(model, scale):
        return torch.optim.AdamW([*model.parameters(), scale], lr=1e-2)

    def loss_with(scale):
        return lambda model, x, step, rank: (model(x) * scale).square().mean() + scale.sum()

    model, plain = seeded(Stack), seeded(Stack)
    scale, plain_scale = (nn.Parameter(torch.tensor([1.0, 2.0]).double()) for _ in range(2))
    engine = sharded(model, optimizer=lambda m: with_scale(m, scale))
    optimizer = with_scale(plain, plain_scale)
    for step in range(4):
        mine = train(world, engine, model, loss_with(scale), [step])
        theirs = train_plain(plain, optimizer, loss_with(plain_scale), [step], size=world.size)
        assert same_figures(mine, theirs)
        assert torch.allclose(scale, plain_scale, rtol=1e-9)
    with engine.full_parameters(write=True), torch.no_grad():
        scale.fill_(3.0)
    assert scale.tolist() == [3.0, 3.0]
    assert at_rest(model.head.weight)


def averages(world):
    model, plain = seeded(Stack), seeded(Stack)
    engine, optimizer = sharded(model, ema_decay=0.8), adamw(plain)
    average = copy.deepcopy(plain)
    for step in range(4):
        train(world, engine, model, squares, [step])
        train_plain(plain, optimizer, squares, [step], size=world.size)
        with torch.no_grad():
            for a, p in zip(average.parameters(), plain.parameters(), strict=True):
                a.lerp_(p, 0.2)
        with engine.ema():
            with torch.no_grad():
                assert torch.allclose(model(batch(9)), average(batch(9)), rtol=1e-9)
            same_weights(engine, model, average)
        with torch.no_grad():
            assert torch.allclose(model(batch(9)), plain(batch(9)), rtol=1e-9)
    same_weights(engine, model, plain)


def given_back(world):
    """After engine.close() the model and the optimizer are plain ones, and continue equally."""
    model, plain = seeded(Stack), seeded(Stack)
    optimizer = adamw(model)
    engine = sharded(model, optimizer=lambda _: optimizer)
    plain_optimizer = adamw(plain)
    train(world, engine, model, squares, range(2))
    train_plain(plain, plain_optimizer, squares, range(2), size=world.size)
    state = engine.optimizer_state_dict()["state"]
    wanted = plain_optimizer.state_dict()["state"]
    assert all(torch.allclose(state[n]["exp_avg"], wanted[n]["exp_avg"]) for n in wanted)
    engine.close()
    assert not any(module._forward_hooks for module in model.modules())
    copy.deepcopy(model)
    for each, trainer in ((model, optimizer), (plain, plain_optimizer)):
        trainer.zero_grad()
        each(batch(2)).square().mean().backward()
        trainer.step()
    for name, value in model.state_dict().items():
        assert torch.allclose(value, plain.state_dict()[name], rtol=1e-9)


def clipped(world):
    model, plain = seeded(Stack), seeded(Stack)
    engine, optimizer = sharded(model), adamw(plain)
    for step in range(3):
        x = world.share(batch(step))
        engine.backward(squares(model, x, step, 0), weight=len(x))
        stats = engine.step(max_norm=0.05)
        optimizer.zero_grad()
        squares(plain, batch(step), step, 0).backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
        optimizer.step()
        assert abs(stats.grad_norm - norm.item()) < 1e-9
    same_weights(engine, model, plain)


@by_turns(
    case=[unfrozen_on_the_way, group_added, outside_of_the_models, averages, given_back, clipped]
)
def test_life(group, ranks, case):
    on(group, ranks)(case)


# -- precision --------------------------------------------------------------------------------


def lower_precision(world, precision):
    """Computation in 16 bits gives the results of replicated parameters."""

    def figures(zero):
        torch.manual_seed(3)
        model = Stack()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        engine = sw.Engine(model, optimizer, zero=zero, bucket_mb=0.001, precision=precision)
        told = []
        for step in range(5):
            x = world.share(batch(step).float())
            engine.backward(model(x).square().mean(), weight=len(x))
            told.append(engine.step().loss)
        with engine.full_parameters():
            return told, {name: value.clone() for name, value in model.state_dict().items()}

    losses, weights = figures(3)
    wanted, plain = figures(2)
    # A master that differs in its last bit may round to another bf16.
    tolerance = 2e-2 if precision == "bf16" else 1e-5
    assert losses == pytest.approx(wanted, rel=tolerance)
    assert losses[-1] < losses[0]
    for name, value in weights.items():
        assert value.dtype == (torch.bfloat16 if precision == "bf16" else torch.float32)
        assert torch.allclose(value, plain[name], rtol=tolerance, atol=tolerance), name


@by_turns(precision=["bf16", "bf16-mixed", "fp16-mixed"])
def test_precision(group, ranks, precision):
    on(group, ranks)(lower_precision, precision)
