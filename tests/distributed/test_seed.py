"""Seeds: all ranks draw like one plain process, up to the first training batch."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import shardwise as sw
from shardwise.config import Settings
from shardwise.errors import ConfigError, DataError, UsageError
from shardwise.world.common_random_stream import CommonRandomStream
from shardwise.world.mesh import mesh_of
from tests.distributed.group import RankFailed

SIZES = (1, 2, 3)


def drawn():
    """Return draws of a script before training."""
    return nn.Linear(3, 3).weight.detach(), torch.randn(4), np.random.rand(3), random.random()


def plainly(seed):
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def begin(world, seed):
    """Reset `world` to its state after sw.init(seed=...)."""
    plainly(seed)
    world.draws, world.current_batch.batch = CommonRandomStream(world.device), None
    world.current_batch.watch(world.draws.before_batch)


def engine_of(model, **settings):
    return sw.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), **settings)


def begins_case(world, zero):
    """Draw after `sw.init(seed=11)`, and create two engines in between."""
    begin(world, 11)
    first = nn.Linear(4, 4)
    engines = [engine_of(first, zero=zero)]
    middle = drawn()
    second = nn.Sequential(nn.Linear(4, 2), nn.Dropout(0.5))
    engines.append(engine_of(second, zero=zero))
    last = drawn()
    x = world.share(torch.randn(6, 4))
    apart = torch.rand(1).item()
    engines[0].backward(first(x).square().mean())
    losses = [engines[0].step().loss]
    engines[1].backward(second(x).square().mean())
    losses.append(engines[1].step().loss)
    for engine in engines:
        engine.close()
    return middle, last, losses, apart


@pytest.mark.parametrize("size", SIZES)
def test_models_engines_and_data_are_those_of_one_process(group, size):
    plainly(11)
    model = nn.Linear(4, 4)
    middle = drawn()
    nn.Sequential(nn.Linear(4, 2), nn.Dropout(0.5))
    last = drawn()
    x = torch.randn(6, 4)
    loss = model(x).square().mean().item()
    for zero in (0, 3):
        told = group(size)(begins_case, zero)
        for ours in told:
            for mine, wanted in zip((*ours[0], *ours[1]), (*middle, *last), strict=True):
                torch.testing.assert_close(torch.as_tensor(mine), torch.as_tensor(wanted))
            assert ours[2][0] == pytest.approx(loss, rel=1e-6)
        assert len({ours[3] for ours in told}) == size, "from then on each rank draws for itself"
        assert told[0][2] == told[-1][2]


# -- the common stream of all ranks ---------------------------------------------------------------


def plain_noise(seed, steps, rows):
    plainly(seed)
    nn.Linear(2, 2)
    found = []
    for _ in range(steps):
        noise = torch.randn(rows, 3)
        found.append((noise, torch.randint(0, 100, (rows,)), np.random.rand()))
    return found


def noise_case(world, micro, exact_steps):
    begin(world, 5)
    model = nn.Linear(2, 2)
    engine = engine_of(model)
    loader = sw.Loader(TensorDataset(torch.ones(20, 2)), batch_size=8, micro_batch_size=micro)
    found = []
    for step in loader.steps():
        parts = []
        for (x,) in step:
            noise = world.draw(lambda n: torch.randn(n, 3))
            times = world.draw(lambda n: torch.randint(0, 100, (n,)))
            with world.alike() if len(step) == 1 else torch.no_grad():
                alike = np.random.rand()
            assert len(x) == len(noise) == len(times)
            parts.append((noise, times))
            torch.rand(3)  # this rank's own
            engine.backward(model(x).mean())
        engine.step()
        noise, times = (torch.cat(each) for each in zip(*parts, strict=True))
        found.append((noise, times, alike))
    engine.close()
    return found


@pytest.mark.parametrize("size", SIZES)
def test_rows_of_what_one_process_draws(group, size):
    """20 rows in steps of 8, 8 and 4; micro-batches of a step draw the same numbers once."""
    told = group(size)(noise_case, None, 3)
    for number, rows in enumerate((8, 8)):  # in the last step one process has 4 rows
        noise = torch.cat([ours[number][0] for ours in told])
        times = torch.cat([ours[number][1] for ours in told])
        wanted = plain_noise(5, 2, rows)[number]
        assert torch.equal(noise, wanted[0])
        assert torch.equal(times, wanted[1])
        assert {ours[number][2] for ours in told} == {wanted[2]}


@pytest.mark.parametrize("size", SIZES)
def test_micro_batches_draw_once_a_step(group, size):
    whole = group(1)(noise_case, 8, 3)[0]
    told = group(size)(noise_case, 2, 3)
    for number in range(3):
        for each in range(2):
            mine = torch.cat([ours[number][each] for ours in told])
            assert torch.equal(mine, whole[number][each])


def resumed_case(world, folder, stops):
    """Draw noise in four steps; the second half in an engine that was loaded."""
    begin(world, 5)
    model, found = nn.Linear(2, 2), []
    engine = engine_of(model)
    start = 0
    if not stops:
        plainly(77)
        start = engine.resume(folder)
    for step in range(start, 2 if stops else 4):
        x = world.share(torch.ones(6, 2))
        found.append(world.draw(lambda n: torch.randn(n)).tolist())
        engine.backward(model(x).mean() + 0 * step)
        engine.step()
    if stops:
        engine.save(folder)
    engine.close()
    return found


def test_a_checkpoint_continues_the_common_stream(group, tmp_path):
    group(2)(resumed_case, tmp_path, True)
    resumed = group(3)(resumed_case, tmp_path, False)
    plainly(5)
    nn.Linear(2, 2)
    wanted = [torch.randn(6).tolist() for _ in range(4)]
    assert [[*a, *b, *c] for a, b, c in zip(*resumed, strict=True)] == wanted[2:]


def late_case(world, folder, stops):
    """Run with the first draw after the checkpoint."""
    begin(world, 5 if stops else 77)
    model = nn.Linear(2, 2)
    engine = engine_of(model)
    if stops:
        engine.backward(model(torch.ones(3, 2)).mean())
        engine.step()
        engine.save(folder)
    else:
        engine.resume(folder)
    drawn = world.draw(lambda n: torch.randn(n), rows=4)
    engine.close()
    return drawn.tolist()


def test_a_checkpoint_saves_the_stream_before_the_first_draw(group, tmp_path):
    assert group(2)(late_case, tmp_path, True) == group(2)(late_case, tmp_path, False)


def alone_case(world):
    """Before training, summarise the model on one rank, and draw on another."""
    begin(world, 5)
    model = nn.Linear(2, 2)
    engine = engine_of(model)
    with world.alike():
        first = torch.rand(2).tolist()
    if world.rank == 0:
        model(torch.ones(1, 2))
    if world.rank == world.size - 1:
        torch.rand(1)
    found = []
    for _ in range(2):
        rows = world.draw(lambda n: torch.randn(n), rows=2 * world.size)
        with world.alike():
            found.append((np.random.rand(), random.random(), torch.rand(1).item()))
        engine.backward(model(rows.view(-1, 2)).mean())
        engine.step()
    engine.close()
    return first, found


def test_draws_of_one_rank_do_not_change_the_common_stream(group):
    """Common draws continue from rank 0's position."""
    plainly(5)
    nn.Linear(2, 2)
    first, found = torch.rand(2).tolist(), []
    for _ in range(2):
        torch.randn(4)
        found.append((np.random.rand(), random.random(), torch.rand(1).item()))
    assert group(2)(alone_case) == [(first, found)] * 2


def refused_case(world):
    begin(world, 1)
    with pytest.raises(DataError, match=r"world.draw\(make, rows=n\)"):
        world.draw(lambda n: torch.randn(n))
    with pytest.raises(DataError, match=r"called make\(6\), which returned .* \[4\]"):
        world.draw(lambda n: torch.randn(4), rows=6)
    assert len(world.draw(lambda n: torch.randn(n), rows=6)) == 6 // world.size
    assert world.draw(lambda n: torch.randn(2, n), rows=6, dim=1).shape == (2, 6 // world.size)
    x = torch.ones(2, requires_grad=True)

    def again(x):
        return x * world.draw(lambda n: torch.randn(n), rows=2 * world.size)

    with pytest.raises(UsageError, match="in a forward that backward runs again"):
        torch.utils.checkpoint.checkpoint(again, x, use_reentrant=False).sum().backward()


def test_draw_refuses_unknown_numbers_of_rows(group):
    group(2)(refused_case)


def time_first_case(world):
    """Draw rows along dimension 1, as for a recurrent network."""
    batch = torch.arange(12.0).view(2, 6)
    mine = world.share((batch, batch.int()), dim=1)
    assert world.current_batch.batch.samples == mine[0].shape[1]
    return mine[0]


def test_rows_along_another_dimension(group):
    parts = group(3)(time_first_case)
    assert torch.equal(torch.cat(parts, 1), torch.arange(12.0).view(2, 6))
    with pytest.raises(RankFailed, match=r"the same dimension 2 above 0, not \[0\]"):
        group(1)(too_far_case)


def too_far_case(world):
    world.share(torch.ones(2, 3), dim=2)


def stays_case(world, zero):
    """With reseed=False each rank's generators keep the state that the script gave them."""
    torch.manual_seed(world.rank)
    expected = torch.rand(3).tolist()
    torch.manual_seed(world.rank)
    model = nn.Linear(4, 2)
    engine = engine_of(model, zero=zero)
    torch.manual_seed(world.rank)
    seen = []
    for _ in range(3):
        engine.backward(model(torch.ones(2, 4)).square().mean())
        engine.step()
        seen.append(torch.rand(1).item())
    assert seen == pytest.approx(expected)
    engine.close()
    return seen


def test_no_reseed_keeps_the_scripts_generators(group):
    first, second = group(2, reseed=False)(stays_case, 2)
    assert first != second


def test_no_reseed_refuses_split_models():
    with pytest.raises(ConfigError, match="--no-reseed cannot be combined with --pipeline 2"):
        mesh_of(Settings(reseed=False, pipeline=2), 2, 1)
