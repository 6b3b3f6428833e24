"""Batches without a Loader: rows joined over workers, stand-ins, and common random draws."""

import contextlib
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

import shardwise as sw
from shardwise.errors import DataError, UsageError
from shardwise.world.common_calls import CommonCalls
from tests.distributed.test_seed import begin, plainly
from tests.tables import each_value

SIZES = (1, 2, 3)


def fresh(world):
    """Reset `world` to its state after sw.init(seed=5), with no line printed yet."""
    begin(world, 5)
    world.calls = CommonCalls()
    world._printed.clear()
    world._warned_of_stand_in, world.current_batch.stand_in = False, None


def model_of(width):
    return nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 3)).double()


def engine_of(model, **settings):
    return sw.Engine(model, torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9), **settings)


# -- rows of all workers --------------------------------------------------------------------------


def pairs(one, two):
    """Return a loss over pairs of rows that depends on their order and number."""
    a, b = F.normalize(one, dim=1), F.normalize(two, dim=1)
    return F.cross_entropy(a @ b.T / 0.5, torch.arange(len(a)))


BATCHES = (8, 2, 7, 1, 3)


def joined_case(world, zero, by_loader):
    fresh(world)
    data, model, losses = torch.randn(sum(BATCHES), 5).double(), model_of(6), []
    engine = engine_of(model, zero=zero)
    batches = (
        sw.Loader(data, batch_sampler=torch.arange(len(data)).split(BATCHES))
        if by_loader
        else map(world.share, data.split(BATCHES))
    )
    for x, rows in zip(batches, BATCHES, strict=True):
        out = model(x)
        joined = [world.gather_rows(each) for each in (out, out.sin())]
        assert {len(each) for each in joined} == {rows}
        loss = pairs(*joined)
        engine.backward(loss, reduction="sum")
        engine.step()
        losses.append(loss.item())
    engine.close()
    return losses


def plain_losses():
    plainly(5)
    data, model, losses = torch.randn(sum(BATCHES), 5).double(), model_of(6), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    for x in data.split(BATCHES):
        out = model(x)
        loss = pairs(out, out.sin())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@each_value(size=SIZES, by_loader=[False, True])
def test_a_loss_over_pairs_is_that_of_plain_pytorch(group, size, by_loader):
    """Also if rows are not a multiple of the workers, or fewer than workers."""
    expected = plain_losses()
    for zero in (0, 3):
        for ours in group(size)(joined_case, zero, by_loader):
            assert ours == pytest.approx(expected, rel=1e-9)


def forms_case(world):
    for dtype in (torch.bool, torch.int16, torch.bfloat16, torch.complex64, torch.float64):
        whole = torch.arange(10).view(2, 5).to(dtype)
        assert torch.equal(world.gather_rows(world.share(whole, dim=1), dim=1), whole)
        assert torch.equal(world.gather_rows(world.share(whole)), whole)
    assert world.gather_rows(world.share(torch.zeros(4, 0))).shape == (4, 0)
    with torch.no_grad():
        assert not world.gather_rows(world.share(torch.ones(4, 2))).requires_grad
    x = world.share(torch.ones(6, 2))
    with pytest.raises(DataError, match=r"of this worker's 2 row.*not 4 along first dim.*chunk"):
        world.gather_rows(torch.cat([x, x]))
    with pytest.raises(DataError, match=r"shape \(2,\) and .* on worker 0, and of \(3,\)"):
        world.gather_rows(x if world.rank == 0 else torch.ones(2, 3))


def test_rows_of_every_dtype_and_dimension_are_joined(group):
    group(3)(forms_case)


def parts_case(world):
    loader = sw.Loader(torch.ones(8, 2), batch_size=8, micro_batch_size=2)
    for x in (x for step in loader.steps() for x in step):
        with pytest.raises(UsageError, match="Remove --micro-batch-size"):
            world.gather_rows(x)


def test_gather_rows_refuses_micro_batches(group):
    group(2)(parts_case)


# -- stand-ins ------------------------------------------------------------------------------------


def counted_case(world, evaluates, looks):
    fresh(world)
    x, told = torch.randn(10, 5).double(), io.StringIO()
    model, seen = model_of(4), 0
    engine = engine_of(model)
    with contextlib.redirect_stderr(told):
        for batch in x.split(9):
            with torch.set_grad_enabled(not evaluates):
                mine = world.share(batch)
                out = model(mine)
            if not evaluates:
                engine.backward(out.square().mean())
                engine.step()
            seen += len(out[: world.rows]) if looks else len(out)
        for _ in range(2):
            total = world.sum(torch.tensor(seen)).item()
    engine.close()
    return total, told.getvalue()


@pytest.mark.parametrize("evaluates", [False, True])
def test_warns_of_sums_that_count_stand_ins(group, evaluates):
    for size in SIZES:
        for total, told in group(size)(counted_case, evaluates, True):
            assert (total, told) == (10, "")
    (total, told), *others = group(3)(counted_case, evaluates, False)
    assert total == 12
    assert told.count("\n") == 1
    assert "world.sum (" in told
    assert "test_own_batches.py:" in told
    assert "world.share gave this worker a stand-in" in told
    assert "scores[: world.rows]" in told
    assert all(words == "" for _, words in others), "the main rank alone says it"


def means_case(world):
    """Metrics handle stand-ins, so they cause no warning."""
    fresh(world)
    told, metrics = io.StringIO(), sw.Metrics()
    with contextlib.redirect_stderr(told), torch.no_grad():
        for batch in torch.arange(10.0).split(9):
            metrics.add(value=world.share(batch).mean())
        assert metrics.compute() == {"value": pytest.approx(4.5)}
    assert told.getvalue() == ""
    world.current_batch.batch = None
    with pytest.raises(DataError, match=r"world\.rows was read before the first batch"):
        _ = world.rows


def test_metrics_with_stand_ins_cause_no_warning(group):
    group(3)(means_case)


# -- common draws ---------------------------------------------------------------------------------


class Augmented(Dataset):
    """A dataset that draws random numbers in each sample."""

    def __init__(self, x):
        self.x = x

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index] + torch.rand(()).double(), f"row {index}"


def loader_case(world):
    fresh(world)
    loader = DataLoader(Augmented(torch.randn(11, 5).double()), batch_size=4, shuffle=True)
    model, losses, names = model_of(4), [], []
    engine = engine_of(model)
    batches = world.alike(loader)
    assert len(batches) == 3
    for _ in range(2):
        for x, name in batches:
            x, name = world.share((x, name))
            assert len(x) == len(name)
            engine.backward(model(x).square().mean())
            losses.append(engine.step().loss)
            names += name[: world.rows]
    engine.close()
    return losses, names


def test_alike_over_a_loader_gives_the_batches_of_one_process(group):
    plainly(5)
    loader = DataLoader(Augmented(torch.randn(11, 5).double()), batch_size=4, shuffle=True)
    model, expected, named = model_of(4), [], []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    for _ in range(2):
        for x, name in loader:
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            expected.append(loss.item())
            named += name
    for size in SIZES:
        told = group(size)(loader_case)
        assert sorted(name for _, names in told for name in names) == sorted(named)
        for losses, _ in told:
            assert losses == pytest.approx(expected, rel=1e-9)


def inside_case(world):
    """A forward with gradients inside the block does not move the common stream."""
    fresh(world)
    model = model_of(4)
    engine = engine_of(model)
    told = io.StringIO()
    with contextlib.redirect_stderr(told):
        with world.alike():
            drawn = [torch.rand(1).item()]
            loss = model(world.share(torch.ones(6, 5).double())).mean()
            drawn.append(torch.rand(1).item())
            with pytest.raises(UsageError, match=r"engine\.backward was called inside .*do not t"):
                engine.backward(loss)
        engine.backward(loss)
        with world.alike(), pytest.raises(UsageError, match=r"engine\.step\(\) was called inside"):
            engine.step()
        engine.step()
        with world.alike():
            drawn.append(torch.rand(1).item())
    assert told.getvalue() == ""
    engine.close()
    return drawn


def test_alike_refuses_training_and_a_forward_does_not_draw_from_it(group):
    plainly(5)
    model_of(4)
    expected = torch.rand(3).tolist()
    for size in SIZES:
        assert group(size)(inside_case) == [expected] * size


# -- calls that all ranks must make ---------------------------------------------------------------


def early_case(world):
    """The second worker leaves an inner loop because of its rows; all make the same steps."""
    fresh(world)
    model = model_of(4)
    engine = engine_of(model)
    data, told, loss = torch.randn(8, 5).double(), [], None
    try:
        for iteration in range(2):
            with world.alike():
                rollout = torch.rand(8, 5).double()
            for epoch in range(3 - (world.rank + iteration) % 2):
                with world.alike():
                    order = torch.randperm(8)
                engine.backward(model(world.share((data + rollout)[order])).square().mean())
                loss = engine.step().loss
                told.append((iteration, epoch, loss))
    except UsageError as error:
        return told, str(error)
    finally:
        engine.close()
    return told, ""


def test_names_a_worker_that_leaves_a_loop_early_with_its_lines(group):
    told = group(2)(early_case)
    for steps, error in told:
        assert len(steps) == 2
        assert "Workers made different calls before this step" in error
        assert "rank 0 called world.alike 1 time(s) (" in error
        assert "rank 1 called world.alike 1 time(s) (" in error
        assert error.count("test_own_batches.py:") >= 5
        assert "engine.step().loss" in error


def own_calls_case(world, zero):
    """Calls that a rank may make alone: share for an evaluation, evaluate, other lines."""
    fresh(world)
    model, told = model_of(4), io.StringIO()
    engine = engine_of(model, zero=zero)
    data = torch.randn(8, 5).double()
    with contextlib.redirect_stderr(told):
        for _ in range(3):
            # two lines
            x = world.share(data) if world.rank == 0 else None
            x = world.share(data) if x is None else x
            engine.backward(model(x).square().mean())
            if world.is_main:
                with torch.no_grad():
                    world.share(data[:4])
            with engine.uneven(), torch.no_grad():
                for _ in range(world.rank):
                    model(world.share(data[:2]))
            engine.step()
        for _ in range(2):  # without a batch of world.share
            engine.backward(model(data).square().mean())
            engine.step()
        with torch.no_grad():
            assert len(world.gather(len(world.share(data)))) == world.size
    assert told.getvalue() == ""
    engine.close()


@pytest.mark.parametrize("zero", [0, 3])
def test_allows_calls_of_a_single_rank_outside_training(group, zero):
    group(2)(own_calls_case, zero)


def shares_case(world):
    fresh(world)
    model, told = model_of(4), io.StringIO()
    engine = engine_of(model, zero=0)
    data = torch.randn(4, 5).double()
    with contextlib.redirect_stderr(told):
        for _ in range(2):
            for n in range(2 - world.rank):
                engine.backward(model(world.share(data)).square().mean(), last=n == 1 - world.rank)
            engine.step()
    engine.close()
    return told.getvalue()


def test_warns_once_of_different_numbers_of_batches(group):
    told, silent = group(2)(shares_case)
    assert silent == ""
    assert told.count("\n") == 1
    assert "rank 0 called world.share 2 time(s) (" in told
    assert "rank 1 called world.share 1 time(s) (" in told


def digest_case(world, how):
    fresh(world)
    model, told = model_of(4), io.StringIO()
    engine = engine_of(model)
    data, labels = torch.randn(16, 5).double(), torch.randint(0, 3, (16,))
    with contextlib.redirect_stderr(told):
        for _ in range(3):
            if how == "alike":
                with world.alike():
                    order = torch.randperm(16)
            else:
                order = torch.randperm(16) if how == "apart" else torch.arange(16)
            x = data[order]
            if how == "augmented":
                x = x + torch.rand(16, 1)
            if how == "rounded":
                x = x * (1 + 1e-9 * world.rank)
            if how == "nan":
                x[0, 0] = float("nan")
            names = [str(int(n)) for n in order]
            batch = (x.numpy(), labels[order], names)
            x, y, _ = world.share(batch)
            x = torch.from_numpy(x).nan_to_num()
            engine.backward(F.cross_entropy(model(x), y))
            engine.step()
    engine.close()
    return told.getvalue()


@pytest.mark.parametrize("how", ["alike", "plain", "rounded", "nan"])
def test_allows_the_same_batch_on_all_ranks(group, how):
    assert group(3)(digest_case, how) == [""] * 3


@pytest.mark.parametrize("how", ["apart", "augmented"])
def test_warns_once_of_batches_that_differ_with_the_line(group, how):
    told, *silent = group(3)(digest_case, how)
    assert silent == ["", ""]
    assert told.count("\n") == 1
    assert "world.share (" in told
    assert "test_own_batches.py:" in told
    assert "another batch on worker 1 than on worker 0" in told
    assert "for batch in world.alike(loader)" in told
