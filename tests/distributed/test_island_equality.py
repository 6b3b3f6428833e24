"""Islands keep their common state equal: initial weights, frozen parameters, loads, skipped
steps."""

import pytest
import torch
from torch import nn

import shardwise as sw
from tests.distributed.test_islands import (
    EVERY,
    batches,
    flat,
    loss_of,
    mlp,
    normed,
    optimizer_of,
    put,
)


def stepped(world, engine, model, several):
    for batch in several:
        engine.backward(loss_of(model, world.share(batch)))
        engine.step()


def bias_of(engine, model):
    with engine.full_parameters():
        return model[2].bias.detach().clone()


def frozen_case(world, how, zero):
    """Freeze a bias one step after a boundary; return it at the boundary, before the next one,
    after it."""
    model = mlp()
    model[0].bias.requires_grad_(how != "rebuild")
    optimizer = optimizer_of("sgd", model)
    engine = sw.Engine(model, optimizer, equal_every=EVERY, zero=zero)
    first, second, third = batches().split([EVERY, 1, 3])
    stepped(world, engine, model, first)
    common = bias_of(engine, model)
    stepped(world, engine, model, second)
    model[2].bias.requires_grad_(False)
    if how == "rebuild":
        model[0].bias.requires_grad_(True)
    if how == "leave":
        parameters = optimizer.param_groups[0]["params"]
        optimizer.param_groups[0]["params"] = [p for p in parameters if p is not model[2].bias]
    if how == "load":
        engine.load_optimizer_state_dict(engine.optimizer_state_dict())
    stepped(world, engine, model, third[:1])
    between = bias_of(engine, model)
    stepped(world, engine, model, third[1:])
    end = bias_of(engine, model)
    engine.close()
    return common, between, end


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("how", ["freeze", "rebuild", "load", "leave"])
def test_frozen_parameters_become_equal(group, how, zero):
    """At the next boundary, or immediately if no later boundary would average it."""
    (common, mine, end), (_, theirs, other) = group(2, islands=2)(frozen_case, how, zero)
    assert torch.equal(end, other)
    assert torch.equal(mine, theirs) == (how == "leave")
    assert torch.equal(end, common) == (how == "leave")


def written_case(world, zero):
    """Rank 0 writes values that only it knows, before the first step."""
    model = mlp()
    engine = sw.Engine(model, optimizer_of("sgd", model), equal_every=2, zero=zero)
    with engine.full_parameters(write=True):
        if world.rank == 0:
            put_in_place(model, flat(model) * 2)
    with engine.full_parameters():
        found = flat(model)
    stepped(world, engine, model, batches(2))
    engine.close()
    return found, flat(model)


def put_in_place(model, values):
    other = mlp()
    put(other, values)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        mine.copy_(theirs)


@pytest.mark.parametrize("zero", [0, 3])
def test_all_begin_from_weights_written_by_rank_0(group, zero):
    found = group(4, islands=2)(written_case, zero)
    for start, end in found:
        assert torch.equal(start, flat(mlp()) * 2)
        assert torch.equal(end, found[0][1])


def apart_case(world):
    model = mlp()
    engine = sw.Engine(model, optimizer_of("sgd", model), equal_every=2)
    with torch.no_grad():
        model[0].weight.mul_(1 + world.rank)
    for _ in range(2):
        engine.backward(loss_of(model, world.share(batches(1)[0])))
        with pytest.raises(
            sw.errors.ModelMismatch, match="worker 1 and worker 0 hold the same part"
        ):
            engine.step()
    engine.close()


def test_rejects_different_initial_weights(group):
    group(2, islands=2)(apart_case)


def lost_case(world, what, words):
    """An anchor that has changed on one island, or a further step, is detected at the next
    boundary."""
    model = mlp()
    engine = sw.Engine(model, optimizer_of("sgd", model), equal_every=2)
    stepped(world, engine, model, batches(3))
    if world.rank == 1 and what == "anchor":
        engine._states.hooks.exchange.anchor.storages["value"][0].loaded()[0] += 1
    engine._state.steps += 2 * (world.rank == 1 and what == "steps")
    with pytest.raises(sw.errors.ShardwiseError, match=words):
        stepped(world, engine, model, batches(1))
    engine.close()


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("anchor", "last common parameters before step 4 differ between island 1 and island 0"),
        ("steps", "Island 1 has made 6 steps, but island 0 4"),
    ],
)
def test_raises_when_islands_diverge(group, what, words):
    group(2, islands=2)(lost_case, what, words)


def partial_case(world, path):
    """Load a file without the last layer between two boundaries."""
    model = mlp()
    engine = sw.Engine(model, optimizer_of("sgd", model), equal_every=2)
    stepped(world, engine, model, batches(3))
    if world.rank == 0:
        torch.save({"0.weight": torch.ones(40, 6).double()}, path)
    world.barrier()
    engine.load(path, strict=False)
    found = flat(model)
    stepped(world, engine, model, batches(1))
    engine.close()
    return found, flat(model)


def test_partial_load_keeps_the_common_weights(group, tmp_path):
    (mine, closed), (theirs, other) = group(2, islands=2)(partial_case, tmp_path / "part.pt")
    assert torch.equal(mine, theirs)
    assert torch.equal(closed, other)


def nested_case(world):
    model = mlp()
    engine = sw.Engine(model, optimizer_of("sgd", model), equal_every=2)
    stepped(world, engine, model, batches(3))
    own = flat(model)
    with engine.anchor():
        outer = flat(model)
        with engine.anchor():
            inner = flat(model)
        with pytest.raises(sw.errors.UsageError, match=r"inside engine.ema\(\) or anchor\(\)"):
            engine.full_parameters(write=True).__enter__()
    assert torch.equal(outer, inner)
    assert torch.equal(flat(model), own)
    assert not torch.equal(outer, own)
    engine.close()
    assert torch.equal(flat(model), outer)  # at the end


def test_nested_anchor_blocks(group):
    group(2, islands=2)(nested_case)


# -- weights and buffers -------------------------------------------------------------------------


def weighted_case(world):
    model = mlp()
    engine = sw.Engine(model, optimizer_of("sgd", model), equal_every=2)
    for batch in batches(4):
        rows = batch[:12] if world.rank == 0 else batch[12:]
        engine.backward(loss_of(model, rows), weight=len(rows))
        stats = engine.step()
    engine.close()
    return flat(model), stats.weight


def test_island_counts_by_the_weight_of_its_steps(group):
    models = [mlp(), mlp()]
    for number, batch in enumerate(batches(4), 1):
        for model, rows in zip(models, batch.split([12, 4]), strict=True):
            optimizer = optimizer_of("sgd", model)
            loss_of(model, rows).backward()
            optimizer.step()
            optimizer.zero_grad()
        if number % 2 == 0:
            mean = flat(models[0]) * 0.75 + flat(models[1]) * 0.25
            for model in models:
                put(model, mean)
    for found, weight in group(2, islands=2)(weighted_case):
        assert torch.allclose(found, flat(models[0]), rtol=1e-10, atol=1e-12)
        assert weight == 16


def three_case(world):
    model = mlp()
    settings = {"equal_every": 2, "wire": "int8", "bucket_mb": 1e-3}
    engine = sw.Engine(model, optimizer_of("sgd", model), **settings)
    for batch in batches(4):
        engine.backward(loss_of(model, world.share(batch[:15])))
        engine.step()
    engine.close()
    return flat(model)


def test_three_islands_with_many_buckets(group):
    first, second, third = group(3, islands=3)(three_case)
    assert torch.equal(first, second)
    assert torch.equal(first, third)
    assert not torch.equal(first, flat(mlp()))


def skipping_case(world):
    """One island has a NaN and skips its steps, which do not count."""
    model = mlp()
    settings = {"equal_every": 2, "nonfinite": "skip", "quiet": True}
    engine = sw.Engine(model, optimizer_of("sgd", model), **settings)
    for batch in batches(2):
        loss = loss_of(model, world.share(batch))
        engine.backward(loss * torch.nan if world.rank == 1 else loss)
        skipped = engine.step().skipped
    engine.close()
    return flat(model), skipped


def test_skipped_steps_do_not_count(group):
    (mine, mine_skipped), (theirs, theirs_skipped) = group(2, islands=2)(skipping_case)
    model = mlp()
    for batch in batches(2):
        model.zero_grad()
        loss_of(model, batch[:8]).backward()
        put(model, flat(model) - 0.2 * flat_gradients(model))
    assert (mine_skipped, theirs_skipped) == (False, True)
    assert torch.equal(mine, theirs)
    assert torch.allclose(mine, flat(model), rtol=1e-10, atol=1e-12)


def flat_gradients(model):
    held = nn.ParameterList([nn.Parameter(p.grad.clone()) for p in model.parameters()])
    return flat(held)


def late_buffers_case(world):
    """Island 1 evaluates between a report and its use, and the statistics of both islands approach
    each other."""
    model = normed()
    engine = sw.Engine(model, optimizer_of("sgd", model), equal_every=3, late=1)
    seen = []
    for batch in batches(4):
        engine.backward(loss_of(model, world.share(batch)))
        before = model[1].running_mean.clone()
        engine.step()
        seen.append((before, model[1].running_mean.clone()))
    engine.close()
    return seen


def test_late_statistics_move_by_the_sent_mean(group):
    mine, theirs = group(2, islands=2)(late_buffers_case)
    mean = (mine[2][1] + theirs[2][1]) / 2  # sent after step 3, used after step 4
    for seen in (mine, theirs):
        assert torch.allclose(seen[3][1], mean + seen[3][0] - seen[2][1], rtol=1e-12, atol=1e-15)
        assert not torch.equal(seen[3][1], mean)


def dropped_case(world):
    """Rebuild while differences are in transit: residuals and weights of steps are as before."""
    model = mlp()
    model[0].bias.requires_grad_(False)
    settings = {"equal_every": 3, "late": 1, "wire": "int4", "bucket_mb": 1000.0}
    engine = sw.Engine(model, optimizer_of("sgd", model), **settings)
    stepped(world, engine, model, batches(4))
    islands = engine._states.hooks.exchange
    lost = islands.anchor.storages["residual"][0].loaded().clone()
    weights = list(islands.weights)
    stepped(world, engine, model, batches(2))
    assert islands.in_transit
    sent = islands.anchor.storages["residual"][0].loaded().clone()
    islands.forget()
    back = islands.anchor.storages["residual"][0].loaded().clone()
    counted = list(islands.weights)
    model[0].bias.requires_grad_(True)
    stepped(world, engine, model, batches(1))
    kept = list(engine._states.hooks.exchange.weights)
    engine.close()
    assert not torch.equal(sent, lost)
    assert torch.allclose(back, lost, rtol=1e-9, atol=1e-12)
    assert weights[0] > 0
    assert (counted, kept) == ([3 * weights[0]], [4 * weights[0]])


def test_dropped_difference_is_taken_back(group):
    group(2, islands=2)(dropped_case)
