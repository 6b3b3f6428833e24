"""--sync-batch-norm: the modules that it converts, and the warnings about all others."""

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.engine import start_lines
from shardwise.model import sync_batch_norm

ROWS = 8


class Renamed(nn.BatchNorm2d):
    """A subclass that only sets defaults."""

    def __init__(self, channels):
        super().__init__(channels, momentum=0.4)


class WithActivation(nn.BatchNorm2d):
    """A subclass that delegates the normalisation to its base."""

    def forward(self, x):
        return torch.tanh(super().forward(x))


class ByItself(nn.BatchNorm2d):
    """A subclass whose own forward method normalises."""

    def forward(self, x):
        out = F.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, self.training
        )
        return torch.tanh(out)


class OverOne(ByItself):
    """Delegates the normalisation to a base that does not."""

    def forward(self, x):
        return super().forward(x) * 2


KINDS = [nn.BatchNorm2d, Renamed, WithActivation, nn.SyncBatchNorm]


def net(kind):
    torch.manual_seed(0)
    return nn.Sequential(kind(2), nn.Flatten(), nn.Linear(18, 1)).double()


def images():
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, 2, 3, 3, generator=draw, dtype=torch.float64)
    return x * torch.arange(1, ROWS + 1).view(-1, 1, 1, 1)


def reached(world, kind):
    model = net(kind)
    plain = net(nn.BatchNorm2d if kind is nn.SyncBatchNorm else kind)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    engine = sw.Engine(model, optimizers[0], sync_batch_norm=True)
    assert isinstance(model[0], kind)
    for _ in range(3):
        engine.backward(model(world.share(images())).square().mean())
        engine.step()
        optimizers[1].zero_grad()
        plain(images()).square().mean().backward()
        optimizers[1].step()
    for mine, theirs in zip(model.state_dict().values(), plain.state_dict().values(), strict=True):
        assert torch.allclose(mine.double(), theirs.double(), rtol=1e-9)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(copied[0]) is kind
    assert not start_lines.outside_promise(engine._spec)
    engine.close()
    assert type(model[0]) is kind


def weighted(world):
    """Rows have unequal weights, so each rank's loss is a mean over a different number of items."""
    model, plain = net(nn.BatchNorm2d), net(nn.BatchNorm2d)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    engine = sw.Engine(model, optimizers[0], sync_batch_norm=True)
    x = images()
    for step in range(3):
        items = torch.arange(1.0, ROWS + 1, dtype=torch.float64) * (step + 1)
        mine, counts = world.share((x, items))
        losses = model(mine).square().flatten(1).mean(1)
        engine.backward((losses * counts).sum() / counts.sum(), weight=counts.sum())
        engine.step()
        optimizers[1].zero_grad()
        losses = plain(x).square().flatten(1).mean(1)
        ((losses * items).sum() / items.sum()).backward()
        optimizers[1].step()
    for mine, theirs in zip(model.state_dict().values(), plain.state_dict().values(), strict=True):
        assert torch.allclose(mine.double(), theirs.double(), rtol=1e-9)


def test_weights_other_than_rows(group):
    group(3)(weighted)


@pytest.mark.parametrize("kind", KINDS)
def test_subclasses_are_reached(group, kind):
    group(3)(reached, kind)


def out_of_reach(world, kind):
    model = net(kind)
    engine = sw.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), sync_batch_norm=True)
    assert type(model[0]) is kind
    told = start_lines.outside_promise(engine._spec)
    engine.close()
    return told


@pytest.mark.parametrize("kind", [ByItself, OverOne])
def test_modules_that_normalise_themselves_are_reported(group, kind):
    for (told,) in group(2)(out_of_reach, kind):
        said = "whose normalisation --sync-batch-norm cannot synchronise (1 module)"
        assert told == f"{kind.__name__}, {said}"


def test_a_copy_loads_with_the_plain_class(solo):
    model = net(Renamed)
    sync_batch_norm.convert([model], solo.gather_order, solo.current_batch)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert type(torch.load(file, weights_only=False)[0]) is Renamed


def checkpointed(world, zero, placed):
    """A BatchNorm that torch's checkpoint runs twice, as the last operation of a segment or not."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)]).double()
    plain = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    x = torch.randn(8, 4, dtype=torch.float64)

    def loss_of(layers, x):
        stem, norm, head = layers
        run = norm if placed == "last" else lambda y: norm(y).tanh()
        return head(checkpoint(run, stem(x), use_reentrant=False).tanh()).square().mean()

    engine = sw.Engine(model, optimizers[0], sync_batch_norm=True, zero=zero)
    for _ in range(3):
        engine.backward(loss_of(model, world.share(x)))
        engine.step()
        optimizers[1].zero_grad()
        loss_of(plain, x).backward()
        optimizers[1].step()
    assert model[1].num_batches_tracked == plain[1].num_batches_tracked == 6
    for mine, theirs in zip(model[1].buffers(), plain[1].buffers(), strict=True):
        assert torch.allclose(mine.double(), theirs.double(), rtol=1e-9)
    engine.close()


@pytest.mark.parametrize("placed", ["last", "inside"])
@pytest.mark.parametrize("zero", [0, 3])
def test_checkpointed_statistics_are_updated_as_often_as_on_one_process(group, zero, placed):
    group(2)(checkpointed, zero, placed)


class Choosing(nn.Module):
    """BatchNorm before experts; the sign of a row selects its expert."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(2)
        )

    def forward(self, x):
        y = self.norm(x)
        out = torch.zeros_like(y)
        for expert, chosen in zip(self.experts, (x[:, 0] < 0, x[:, 0] >= 0), strict=True):
            if chosen.any():
                out[chosen] = expert(y[chosen])
        return out


def other_experts(world, zero):
    """Rank 0 uses the expert whose gradients arrive first; the others do not."""
    torch.manual_seed(0)
    model, x = Choosing().double(), torch.randn(9, 4, dtype=torch.float64)
    x[:, 0] = torch.cat([torch.ones(3), -torch.ones(6)])
    plain = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    engine = sw.Engine(model, optimizers[0], sync_batch_norm=True, zero=zero, bucket_mb=0.0001)
    for _ in range(3):
        engine.backward(model(world.share(x)).square().mean())
        engine.step()
        optimizers[1].zero_grad()
        plain(x).square().mean().backward()
        optimizers[1].step()
    with engine.full_parameters():
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.allclose(mine, theirs, rtol=1e-9)
    engine.close()


CELLS = [(zero, "gloo") for zero in (0, 1, 2, 3)] + [(2, "shared"), (3, "shared")]


@pytest.mark.parametrize(("zero", "transport"), CELLS)
def test_ranks_whose_buckets_complete_at_different_times_do_not_deadlock(group, zero, transport):
    """One rank waits for a bucket's sum, another for statistics: neither may block the other."""
    group(3, transport=transport)(other_experts, zero, limit=30)
