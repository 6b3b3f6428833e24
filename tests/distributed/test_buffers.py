"""Buffers and frozen parameters that a forward pass changes match a single process."""

import copy

import pytest
import torch
from torch import nn

import shardwise as sw
from tests.tables import each_value


class Centred(nn.Module):
    """Subtracts a running mean; `kind` selects its storage and the way of writing."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.inner, self.head = nn.Linear(4, 4), nn.Linear(4, 1)
        start = torch.zeros(4, dtype=torch.complex128 if kind == "complex" else torch.float64)
        if kind == "frozen":
            self.mean = nn.Parameter(start, requires_grad=False)
        else:
            self.register_buffer("mean", start)

    def forward(self, x):
        y = self.inner(x - self.mean.real).tanh()
        with torch.no_grad():
            target = self.mean if self.kind in ("buffer", "complex", "frozen") else self.mean.data
            if self.kind == "numpy":
                target = torch.from_numpy(self.mean.numpy())
            target.mul_(0.9).add_(0.1 * x.mean(0))
        return self.head(y).squeeze(1)


class Counted(nn.Module):
    """A model whose output depends on the number of forward passes, not on their data."""

    def __init__(self):
        super().__init__()
        self.inner = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 16))
        self.head = nn.Linear(16, 1)
        self.register_buffer("forwards", torch.zeros((), dtype=torch.float64))

    def forward(self, x):
        self.forwards += 1
        return self.head(self.inner(x).tanh() / self.forwards).squeeze(1)


def drawn(rows):
    draw = torch.Generator().manual_seed(0)
    return torch.randn(rows, 4, dtype=torch.float64, generator=draw) + 1


def two(make):
    torch.manual_seed(1)
    model = make().double() if make is Counted else make()
    plain = copy.deepcopy(model)
    trained = [[p for p in each.parameters() if p.requires_grad] for each in (model, plain)]
    return model, plain, [torch.optim.SGD(parameters, lr=0.1) for parameters in trained]


def same_model(engine, model, plain):
    with engine.full_parameters():
        theirs = plain.state_dict()
        for name, mine in model.state_dict().items():
            assert torch.allclose(mine, theirs[name], rtol=1e-9, atol=1e-12), name


def weighted_case(world, zero, kind, steps):
    """Train with a loss that counts only some rows, a different number on each rank."""

    def loss_of(model, x, counted):
        return (model(x).square() * counted).sum() / counted.sum()

    def make():
        model = Centred(kind)
        for layer in (model.inner, model.head):
            layer.double()
        return model

    model, plain, (mine, theirs) = two(make)
    x, counted = drawn(8), torch.tensor([1.0, 0, 0, 0, 1, 1, 1, 1], dtype=torch.float64)
    engine = sw.Engine(model, mine, zero=zero)
    for _ in range(steps):
        part, of_part = world.share((x, counted))
        engine.backward(loss_of(model, part, of_part), weight=of_part.sum())
        engine.step()
        theirs.zero_grad()
        loss_of(plain, x, counted).backward()
        theirs.step()
    same_model(engine, model, plain)
    engine.close()


@each_value(zero=[0, 2], kind=["buffer", "data", "numpy", "complex", "frozen"])
def test_buffers_are_the_mean_over_rows(group, zero, kind):
    group(2)(weighted_case, zero, kind, 4)


def test_buffers_are_the_mean_over_rows_where_parameters_are_sharded(group):
    group(2)(weighted_case, 3, "data", 4)


PARTS = {"share": (list(range(8)), [8]), "loader": ([0, 1], [2])}
"""Rows of each batch of a step; worker 0 has no row of the second."""


def accumulated_case(world, zero, how):
    model, plain, (mine, theirs) = two(Counted)
    parts = PARTS[how]
    rows = sum(map(len, parts))
    x = drawn(rows)
    data = torch.utils.data.TensorDataset(x)
    loader = sw.Loader(data, batch_size=rows, micro_batch_size=1)
    engine = sw.Engine(model, mine, zero=zero)
    for _ in range(4):
        if how == "share":
            for part in parts:
                engine.backward(model(world.share(x[part])).square().mean())
            engine.step()
        else:
            for step in loader.steps():
                for (part,) in step:
                    engine.backward(model(part).square().mean())
                engine.step()
        theirs.zero_grad()
        for part in parts:
            (plain(x[part]).square().mean() * len(part) / rows).backward()
        theirs.step()
    assert model.forwards == plain.forwards == 8
    same_model(engine, model, plain)
    engine.close()


@pytest.mark.parametrize("how", list(PARTS))
@pytest.mark.parametrize("zero", [0, 3])
def test_forwards_of_a_stand_in_are_counted(group, zero, how):
    group(2)(accumulated_case, zero, how)


def found_late_case(world):
    """Start writing through .data when checksums are no longer compared in every step."""
    model = Centred("data")
    for layer in (model.inner, model.head):
        layer.double()
    engine = sw.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1))
    said, apart = [], []
    engine._state.objects.buffers._report = said.append
    for step in range(40):
        x = world.share(drawn(8))
        out = model.head(model.inner(x)) if step < 10 else model(x)
        engine.backward(out.square().mean())
        engine.step()
        means = world.gather(model.mean.tolist())
        apart.append(means[0] != means[1])
    engine.close()
    return apart, said


def test_writes_that_start_late_are_found_and_reported(group):
    apart, said = group(2)(found_late_case)[0]
    assert apart == [10 <= step < 32 for step in range(40)]
    (line,) = said
    assert line.startswith("the buffer mean differed between workers for up to 32 steps")


class Sized(nn.Module):
    """A buffer with a different size on every worker."""

    def __init__(self, *, persistent):
        super().__init__()
        self.linear = nn.Linear(4, 1).double()
        self.register_buffer("table", torch.zeros(1), persistent=persistent)

    def forward(self, x, length):
        self.table = torch.zeros(length)
        return self.linear(x)


def sized_case(world, persistent):
    model = Sized(persistent=persistent)
    engine = sw.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1))
    said = []
    engine._state.objects.buffers._report = said.append
    for _ in range(3):
        engine.backward(model(world.share(drawn(8)), 2 + world.rank).mean())
        engine.step()
    assert not engine._state.objects.buffers.news()
    engine.close()
    return said


def test_buffers_of_other_shapes_are_named_unless_they_are_caches(group):
    for said in group(2)(sized_case, True):
        (line,) = said
        assert line.startswith(
            "the buffer table is of shape (2,) and torch.float32 on worker 0 and of shape (3,)"
        )
    assert group(2)(sized_case, False) == [[], []]


class Cached(nn.Module):
    """Buffers that forward sets or removes; `how` selects the worker and the values."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.linear = nn.Linear(4, 1).double()
        self.register_buffer("first", torch.ones(3) if how == "forgotten" else None)
        self.register_buffer("last", torch.zeros(4, dtype=torch.float64))

    def forward(self, x, rank):
        with torch.no_grad():
            self.last.data.mul_(0.9).add_(0.1 * x.mean(0))
            if self.how == "forgotten" and rank == 1:
                self.first = None
            elif self.how == "set on one" and rank == 1 and self.first is None:
                self.first = torch.ones(3)
            elif self.how in ("mean", "cache") and self.first is None:
                self.first = x.mean(0) if self.how == "mean" else torch.arange(4).double()
            elif self.how == "mean":
                self.first = 0.9 * self.first + 0.1 * x.mean(0)
        return self.linear(x - self.last)


def cached_case(world, how):
    model = Cached(how)
    reference = copy.deepcopy(model)
    engine = sw.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1))
    buffers, said, counts = engine._state.objects.buffers, [], []
    buffers._report = said.append
    for _ in range(3):
        x = drawn(8)
        engine.backward(model(world.share(x), world.rank).square().mean())
        engine.step()
        reference(x, 0)
        counts.append(len(buffers.form()))
        assert torch.allclose(model.last, reference.last, rtol=1e-12)
        if how in ("mean", "cache"):
            assert torch.allclose(model.first, reference.first, rtol=1e-12)
    engine.close()
    return said, counts


@pytest.mark.parametrize(("how", "places"), [("forgotten", 0), ("set on one", 1)])
def test_buffers_that_one_worker_sets_or_forgets_are_named(group, how, places):
    for said, counts in group(2)(cached_case, how):
        (line,) = said
        words = ("of shape (3,) and torch.float32 on worker 0", "missing on worker 1")
        if places:
            words = ("missing on worker 0", "of shape (3,) and torch.float32 on worker 1")
        assert line.startswith(f"the buffer first is {' and '.join(words)}")
        assert counts == [1, 1, 1]


@pytest.mark.parametrize(("how", "followed"), [("mean", 2), ("cache", 1)])
def test_buffers_that_forward_creates_are_averaged_unless_they_are_equal(group, how, followed):
    for said, counts in group(2)(cached_case, how):
        assert not said
        assert counts == [followed] * 3
