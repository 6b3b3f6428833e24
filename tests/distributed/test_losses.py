"""Losses that are sums, several losses of the same items, weights that user code writes."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import shardwise as sw
from shardwise.errors import ModelError, ModelMismatch, UsageError
from tests.tables import each_value

SIZES = [1, 2, 3]
ROWS = 7
STEPS = 4


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def data(seed=1):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(STEPS * ROWS - 5, 4, generator=draw, dtype=torch.float64)


def plain(loss_of):
    """Return losses and weights of a single process that adds the results of `loss_of`."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    losses = []
    for x in data().split(ROWS):
        optimizer.zero_grad()
        loss = loss_of(model, x)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [p.detach() for p in model.parameters()]


def compare(engine, model, losses, expected):
    """Assert that losses and weights equal one process."""
    values, parameters = expected
    assert losses == pytest.approx(values, rel=1e-10)
    with engine.full_parameters():
        for mine, theirs in zip(model.parameters(), parameters, strict=True):
            assert torch.allclose(mine, theirs, rtol=1e-9, atol=1e-12)


def summed(model, x):
    return model(x).square().sum()


def sums_case(world, zero, how):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    engine = sw.Engine(model, optimizer, zero=zero, bucket_mb=1e-4)
    micro = {"micro": 1, "loader": None, "forward_backward": None}[how]
    loader = sw.Loader(TensorDataset(data()), batch_size=ROWS, micro_batch_size=micro)
    losses, weights = [], []
    for step in loader.steps():
        for (x,) in step:
            if how == "forward_backward":
                engine.forward_backward(lambda x: summed(model, x), x, reduction="sum")
            else:
                engine.backward(summed(model, x), reduction="sum")
        stats = engine.step()
        losses.append(stats.loss)
        weights.append(stats.weight)
    compare(engine, model, losses, plain(summed))
    assert weights == [7.0, 7.0, 7.0, 2.0]


@each_value(size=SIZES, how=["loader", "micro", "forward_backward"])
def test_sums_of_all_workers_are_added(group, size, how):
    """In the last batch, one of three workers has no sample."""
    for zero in (0, 2, 3):
        group(size)(sums_case, zero, how)


SHARES = [4, 1, 2]
"""Rows of each backward of a rank. As with DistributedDataParallel, each counts the same."""


def as_ddp(loss_of, size):
    """Train one process that adds the losses of each rank and averages over ranks."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        parts = [loss_of(model, x) for rank in range(size) for x in shares(step, rank)]
        loss = torch.stack(parts).sum() / size
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [p.detach() for p in model.parameters()]


def shares(step, rank):
    draw = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(sum(SHARES), 4, generator=draw, dtype=torch.float64).split(SHARES)


def mean_square(model, x):
    return model(x).square().mean() / len(SHARES)


def ddp_case(world, zero):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    engine = sw.Engine(model, optimizer, zero=zero, bucket_mb=1e-4)
    losses = []
    for step in range(STEPS):
        for number, x in enumerate(shares(step, world.rank), 1):
            engine.backward(mean_square(model, x), reduction="ddp", last=number == len(SHARES))
        norm = engine.reduce()
        stats = engine.step(max_norm=10.0)
        assert stats.grad_norm == pytest.approx(norm)
        losses.append(stats.loss)
    compare(engine, model, losses, as_ddp(mean_square, world.size))


@pytest.mark.parametrize("size", SIZES)
def test_losses_of_a_worker_add_up_and_workers_are_averaged(group, size):
    for zero in (0, 2, 3):
        group(size)(ddp_case, zero)


def mixed_reductions(world):
    model = net()
    engine = sw.Engine(model, torch.optim.SGD(model.parameters(), lr=1e-2))
    (x,) = data().split(100)
    engine.backward(summed(model, x), reduction="ddp" if world.rank else "sum")
    with pytest.raises(UsageError, match="Ranks disagree on `reduction`"):
        engine.step()
    engine.backward(summed(model, x), reduction="ddp")
    with pytest.raises(UsageError, match="different values of `reduction`"):
        engine.backward(summed(model, x), reduction="sum")
    engine.zero_grad()


def test_refuses_reductions_that_differ_between_ranks(group):
    group(2)(mixed_reductions)


def sums_through_stages(world):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    engine = sw.Engine(model, optimizer, microbatches=3)
    losses = []
    for x in data().split(ROWS):
        told = engine.forward_backward(lambda x: summed(model, x), x, reduction="sum")
        losses.append(engine.step().loss)
        assert float(told) == pytest.approx(losses[-1])
    compare(engine, model, losses, plain(summed))
    engine.close()


def test_sums_through_the_stages_of_a_model(group):
    group(2, pipeline=2)(sums_through_stages)


def two_losses(model, x):
    out = model(x)
    return out.square().mean(), (out - 1).abs().mean()


def same_items_case(world):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    engine = sw.Engine(model, optimizer)
    losses = []
    for (x,) in sw.Loader(TensorDataset(data()), batch_size=ROWS):
        first, second = two_losses(model, x)
        engine.backward(first, weight=len(x), retain_graph=True)
        engine.backward(second, weight=len(x), same_items=True)
        losses.append(engine.step().loss)
    compare(engine, model, losses, plain(lambda model, x: sum(two_losses(model, x))))


@pytest.mark.parametrize("size", SIZES)
def test_losses_of_the_same_items_add_up(group, size):
    group(size)(same_items_case)


def evaluation_between(world):
    model = net()
    engine = sw.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = world.share(data()[:ROWS])
    with torch.no_grad():
        model(world.share(data()[:2]))
    engine.backward(model(x).mean())
    assert engine.step().weight == ROWS


def test_an_evaluation_keeps_the_weight_of_the_fetched_batch(group):
    group(3)(evaluation_between)


def share_in_a_loop(world):
    """Train a GAN's discriminator: real samples from a Loader, noise by world.share."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    engine = sw.Engine(model, optimizer)
    losses = []
    for (x,) in sw.Loader(TensorDataset(data()), batch_size=ROWS):
        engine.backward(model(x).square().mean())
        rows = min(ROWS, len(data()) - len(losses) * ROWS)
        engine.backward(model(world.share(data(2)[:rows])).square().mean())
        losses.append(engine.step().loss)

    def both(model, x):
        return model(x).square().mean() + model(data(2)[: len(x)]).square().mean()

    compare(engine, model, losses, plain(both))


@pytest.mark.parametrize("size", SIZES)
def test_a_share_inside_a_loader_loop_counts_as_its_batch(group, size):
    group(size)(share_in_a_loop)


class Clipping(nn.Module):
    """A module that writes statistics of this worker's rows into its weight, in forward."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3).double()

    def forward(self, x):
        with torch.no_grad():
            self.linear.weight.mul_(1 / (1 + x.abs().max()))
        return self.linear(x)


def written_in_forward(world, zero):
    torch.manual_seed(0)
    model = Clipping()
    engine = sw.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), zero=zero)
    engine.backward(model(world.share(data()[:ROWS])).mean())
    engine.step()


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_refuses_a_forward_that_writes_rank_dependent_values(group, zero):
    for name, message in group(2).errors(written_in_forward, zero):
        assert name == ModelMismatch.__name__
        assert (
            "linear.weight was written to since the last step, with different values on rank 1"
            in message
        )
    group(1)(written_in_forward, zero)


def written_alike(world, zero):
    model, single = net(), net()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, single)]
    engine = sw.Engine(model, optimizers[0], zero=zero)
    for x in data().split(ROWS):
        engine.backward(model(world.share(x)).mean())
        engine.step()
        optimizers[1].zero_grad()
        single(x).mean().backward()
        optimizers[1].step()
        with torch.no_grad():
            for parameter in [*model.parameters(), *single.parameters()]:
                parameter.clamp_(-0.1, 0.1)
    for mine, theirs in zip(model.parameters(), single.parameters(), strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-9)


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_allows_the_same_clipping_on_all_ranks_between_steps(group, zero):
    group(2)(written_alike, zero)


def renormalising(world, zero, trained):
    model = nn.Sequential(nn.Embedding(11, 6, max_norm=0.5), nn.Flatten(), nn.Linear(12, 2))
    model[0].weight.requires_grad_(trained)
    trained = [p for p in model.parameters() if p.requires_grad]
    engine = sw.Engine(model, torch.optim.SGD(trained, lr=0.1), zero=zero)
    engine.backward(model(world.share(torch.arange(8).reshape(4, 2))).square().mean())
    engine.step()


def test_refuses_an_embedding_that_renormalises_in_forward(group):
    group(1)(renormalising, 0, True)
    group(2)(renormalising, 0, False)
    for size, zero in ((2, 0), (2, 2), (1, 3)):
        for name, message in group(size).errors(renormalising, zero, True):
            assert name == ModelError.__name__
            assert message.startswith("0 (max_norm=0.5) rescales in forward the rows")


def idle_beside_sums(world):
    model = net()
    engine = sw.Engine(model, torch.optim.SGD(model.parameters(), lr=1e-2))
    x = data()[:ROWS]
    want = summed(model, x).item() * (world.size - 1)
    if world.rank == 0:
        engine.backward(torch.zeros(()), weight=0)
    else:
        engine.backward(summed(model, x))
    assert engine.step().loss == pytest.approx(want)


def test_an_idle_worker_fits_with_sums(group):
    group(2)(idle_beside_sums)


def sum_in_micro_batches(world):
    model = net()
    engine = sw.Engine(model, torch.optim.SGD(model.parameters(), lr=1e-2), microbatches=2)
    engine.forward_backward(lambda x: summed(model, x), data()[:4])
    engine.step()


def test_refuses_a_sum_cut_into_micro_batches(group):
    for kind, message in group(2, pipeline=2).errors(sum_in_micro_batches):
        assert kind == UsageError.__name__
        assert 'For a loss that is a sum: reduction="sum".' in message


def two_means(world, backwards):
    """Two losses of the same batch: a mean over rows x 4 elements, and one over rows."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 4).double()
    engine = sw.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), quiet=True)
    data = torch.utils.data.TensorDataset(torch.randn(12, 3).double())
    told = []
    for (x,) in sw.Loader(data, batch_size=6):
        y = model(x)
        losses = [y.square().mean(), y.sum(1).abs().mean()]
        if backwards == 1:
            losses = [losses[0] + losses[1]]
        for number, loss in enumerate(losses, 1):
            engine.backward(loss, retain_graph=number < len(losses))
        told.append(engine.step(max_norm=100.0).grad_norm)
    engine.close()
    return told


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_second_loss_of_a_batch_counts_as_the_first(group, ranks):
    """The items of the batch count once, with the weight of the first loss."""
    ((one, *_), (two, *_)) = (group(ranks)(two_means, backwards) for backwards in (1, 2))
    assert two == pytest.approx(one, rel=1e-10)
