"""Evaluations whose last batch has fewer samples than workers: some workers get no batch."""

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

import shardwise as sw
from shardwise.errors import UsageError

BATCH = 4


class Numbers(IterableDataset):
    """A stream of `length` numbers that is divided among ranks."""

    def __init__(self, length, first=0, every=1):
        self.length, self.first, self.every = length, first, every

    def shard(self, num_shards, index):
        return Numbers(self.length, index, num_shards)

    def __iter__(self):
        for number in range(self.first, self.length, self.every):
            yield torch.tensor([float(number)])


def seen(loader):
    """Return the numbers that this rank gets under no_grad."""
    with torch.no_grad():
        return [x.flatten().tolist() for (x,) in loader]


def map_style(world, length, micro):
    loader = sw.Loader(
        TensorDataset(torch.arange(float(length))), batch_size=BATCH, micro_batch_size=micro
    )
    return seen(loader), loader.state_dict()["samples"]


@pytest.mark.parametrize("micro", [None, 1])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_sample_is_given_once_and_no_batch_is_empty(group, size, micro):
    for length in (4, 5, 9, 10):
        ranks = group(size)(map_style, length, micro)
        numbers = [number for batches, _ in ranks for batch in batches for number in batch]
        assert sorted(numbers) == list(range(length))
        assert all(samples == length for _, samples in ranks)


def streamed(world, sharding):
    dataset = Numbers(5)
    loader = sw.Loader(dataset, batch_size=BATCH, sharding=sharding, collate_fn=collated)
    return seen(loader)


def collated(rows):
    return (torch.stack(rows),)


@pytest.mark.parametrize("sharding", ["slice", "dataset"])
def test_streams(group, sharding):
    ranks = group(3)(streamed, sharding)
    numbers = [number for batches in ranks for batch in batches for number in batch]
    assert sorted(numbers) == list(range(5))


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


def problem():
    torch.manual_seed(0)
    return Blocks().double(), torch.randn(9, 4, dtype=torch.float64)


def with_gathers(world):
    """Train, evaluate unevenly with several forward passes per batch, and continue to train."""
    (model, x), (plain, _) = problem(), problem()
    engine = sw.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), zero=3)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(3):
        for (part,) in sw.Loader(TensorDataset(x), batch_size=BATCH):
            engine.backward(model(part).square().mean())
            engine.step()
        for part in x.split(BATCH):
            optimizer.zero_grad()
            plain(part).square().mean().backward()
            optimizer.step()
        total, metrics = 0.0, sw.Metrics()
        with torch.no_grad():
            for (part,) in sw.Loader(TensorDataset(x), batch_size=BATCH):
                for _ in range(2):
                    out = model(part)
                total += out.sum().item()
                metrics.add(out=out.mean())
            expected = plain(x)
        assert sum(world.gather(total)) == pytest.approx(expected.sum().item(), rel=1e-9)
        assert metrics.compute()["out"] == pytest.approx(expected.mean().item(), rel=1e-9)
    engine.close()


@pytest.mark.parametrize("transport", ["gloo", "shared"])
def test_ranks_without_samples_serve_gathers(group, transport):
    settings = {} if transport == "shared" else {"transport": transport}
    group(3, **settings)(with_gathers)


def left_early(world):
    model, x = problem()
    engine = sw.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), zero=3)
    loader = sw.Loader(TensorDataset(x), batch_size=BATCH)
    with torch.no_grad():
        for number, (part,) in enumerate(loader):
            model(part)
            if number == 2:
                break
    (part,) = next(iter(sw.Loader(TensorDataset(x), batch_size=BATCH)))
    engine.backward(model(part).square().mean())
    engine.step()
    engine.close()


def test_an_evaluation_left_in_its_last_batch(group):
    group(3, transport="gloo")(left_early)


def two_engines(world):
    """Evaluate with the models of two engines, one after the other."""
    (first, x), (second, _), (plain, _) = problem(), problem(), problem()
    engines = [
        sw.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), zero=3)
        for model in (first, second)
    ]
    with torch.no_grad():
        loader = sw.Loader(TensorDataset(x), batch_size=BATCH)
        total = sum((first(part) * second(part)).sum().item() for (part,) in loader)
        expected = plain(x).square().sum().item()
    assert sum(world.gather(total)) == pytest.approx(expected, rel=1e-9)
    for engine in engines:
        engine.close()


def test_several_engines_that_gather(group):
    group(3, transport="gloo")(two_engines, limit=30)
    group(3)(two_engines)


def fewer_than_workers(world):
    """Evaluate two samples on three workers, in micro-batches of one global batch."""
    metrics = sw.Metrics()
    with torch.no_grad():
        for (x,) in sw.Loader(TensorDataset(torch.arange(2.0)), batch_size=3):
            metrics.add(mean=x.mean(), n=torch.tensor([float(len(x))]))
    first = metrics.compute()
    return first, metrics.compute()


def test_means_where_a_worker_measured_nothing(group):
    for first, second in group(3)(fewer_than_workers):
        assert first == {"mean": 0.5}
        assert second == {}


def all_ranks_in_the_loop(world):
    with torch.no_grad():
        for (x,) in sw.Loader(TensorDataset(torch.arange(5.0)), batch_size=BATCH):
            world.sum(x.sum())


def test_refuses_collectives_in_a_batch_that_some_ranks_skip(group):
    refused = [each for each in group(2).errors(all_ranks_in_the_loop) if each is not None]
    assert any(
        name == UsageError.__name__ and "world.sum in an evaluation batch" in m
        for name, m in refused
    )


def zipped(world):
    model, x = problem()
    engine = sw.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), zero=3)
    with torch.no_grad():
        one, other = (sw.Loader(TensorDataset(x), batch_size=BATCH) for _ in range(2))
        for (a,), (b,) in zip(one, other, strict=False):
            model(a + b)
    engine.close()
    with torch.no_grad():
        for (a,) in sw.Loader(TensorDataset(x), batch_size=BATCH):
            model(a)


def test_two_loaders_at_a_time_and_none_after_close(group):
    group(3, transport="gloo")(zipped)


def test_micro_batches_are_as_many_on_all_ranks_where_rows_allow_it(group):
    for size in (2, 3):
        ranks = group(size)(counted, 3 * size + 1)
        assert len(set(ranks)) == 1


def counted(world, rows):
    """Return the number of batches of a rank, at two rows per batch."""
    dataset = TensorDataset(torch.arange(float(2 * rows)))
    return len(seen(sw.Loader(dataset, batch_size=rows, micro_batch_size=2)))
