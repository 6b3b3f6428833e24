"""`exact_mean=True` of the Accelerator: every sample counts once, as in plain PyTorch."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from shardwise.errors import UsageError
from tests.distributed.test_accelerate import data, net, ours, ranks, stock

accelerate = pytest.importorskip("accelerate", reason="the accelerate package is not there")

ROWS, BATCH, WINDOW = 21, 8, 2
"""Steps of 16 samples, and one of 5: the last window is short, and its batches are uneven."""


def plain(rows=ROWS, step=BATCH * WINDOW, epochs=2):
    """Train in plain PyTorch. Return losses by step and the final weights."""
    model = net(torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    x, y = data(torch.float64, rows).tensors
    losses = []
    for _ in range(epochs):
        for first in range(0, rows, step):
            part = slice(first, first + step)
            loss = (model(x[part]) - y[part]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses, model


def train(accelerator, rows=ROWS, batch=BATCH, epochs=2, dataset=None):
    """Train with Accelerate, in micro-batches of `batch` rows on each rank."""
    model = net(torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    loader = DataLoader(dataset or data(torch.float64, rows), batch_size=batch)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(epochs):
        model.train()
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward((model(x) - y).square().mean())
                optimizer.step()
                optimizer.zero_grad()
    return model


def distance(model, expected):
    pairs = zip(model.parameters(), expected.parameters(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


def parity_case(world, zero, rows, split):
    config = accelerate.utils.DataLoaderConfiguration(split_batches=split)
    options = {"gradient_accumulation_steps": WINDOW, "dataloader_config": config}
    each = BATCH if split else BATCH // world.size
    _, expected = plain(rows)
    theirs = train(stock(**options), rows, BATCH)
    assert distance(theirs, expected) > 1e-3, "Accelerate has another mean: divided by the window"
    for is_exact in (False, True):
        accelerator = ours(zero=zero, exact_mean=is_exact, **options)
        model = train(accelerator, rows, each)
        with accelerator.full_parameters(model):
            far = distance(model, expected)
        accelerator.free_memory()
        assert far < 1e-12 if is_exact else far > 1e-3


@pytest.mark.parametrize(
    ("size", "split"),
    [(1, False), (2, False), (2, True), pytest.param(4, False, marks=pytest.mark.full)],
)
def test_means_of_plain_pytorch(group, size, split):
    """With 17 and 18 rows, rank 1 has one sample or none in the last batches."""
    for zero, rows in ((0, ROWS), (3, 17 if split else 18))[:size]:
        ranks(group, size)(parity_case, zero, rows, split)


class Centred(nn.Module):
    """A linear layer on the input minus its running mean."""

    def __init__(self):
        super().__init__()
        self.linear = net(torch.float64)
        self.register_buffer("mean", torch.zeros((), dtype=torch.float64))

    def forward(self, x):
        y = self.linear(x - self.mean)
        with torch.no_grad():
            self.mean.lerp_(x.mean(), 0.1)
        return y


def running_mean_case(world):
    """Train with a last batch of three rows on one rank and two on the other."""
    model, plain = Centred(), Centred()
    accelerator = ours(exact_mean=True)
    loader = DataLoader(data(torch.float64, ROWS), batch_size=BATCH // world.size)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
    model, optimizer, loader = accelerator.prepare(model, optimizers[0], loader)
    for x, y in loader:
        accelerator.backward((model(x) - y).square().mean(), weight=len(x) ** 2)
        optimizer.step()
        optimizer.zero_grad()
    for first in range(0, ROWS, BATCH):
        plain(data(torch.float64, ROWS).tensors[0][first : first + BATCH])
    assert torch.allclose(model.mean, plain.mean, rtol=1e-12)
    accelerator.free_memory()


def test_running_means_are_those_of_rows_whatever_losses_weigh(group):
    ranks(group, 2)(running_mean_case)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(zip(*data(torch.float64, ROWS).tensors, strict=True))


def stream_case(world):
    _, expected = plain()
    options = {"gradient_accumulation_steps": WINDOW, "exact_mean": True}
    accelerator = ours(**options)
    model = train(accelerator, batch=BATCH // world.size, dataset=Stream())
    assert distance(model, expected) < 1e-12
    accelerator.free_memory()


def test_data_without_a_length(group):
    ranks(group, 2)(stream_case)


class Texts(Dataset):
    """Rows of different lengths, for which a mean over words is not a mean of means."""

    def __len__(self):
        return ROWS

    def __getitem__(self, row):
        draw = torch.Generator().manual_seed(row)
        words = torch.randint(1, 9, (6,), generator=draw)
        words[2 + row % 5 :] = 0
        return {"words": words, "name": f"text {row}"}


def word_loss(model, words):
    return (model(words.double()[:, :4]) * (words > 0)).square().sum() / (words > 0).sum()


def words_case(world, zero):
    expected = net(torch.float64)
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    words = torch.stack([Texts()[row]["words"] for row in range(ROWS)])
    for part in (words[:16], words[16:]):
        optimizer.zero_grad()
        word_loss(expected, part).backward()
        optimizer.step()
    accelerator = ours(zero=zero, exact_mean=True, gradient_accumulation_steps=2)
    model = net(torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(Texts(), batch_size=BATCH // world.size)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    names = []
    for batch in loader:
        with accelerator.accumulate(model):
            count = int((batch["words"] > 0).sum())
            accelerator.backward(word_loss(model, batch["words"]), weight=count)
            optimizer.step()
            optimizer.zero_grad()
        assert len(batch["name"]) == len(batch["words"])
        names.append(accelerator.gather_for_metrics(batch["words"]))
    assert torch.equal(torch.cat(names), words)
    with accelerator.full_parameters(model):
        assert distance(model, expected) < 1e-12
    accelerator.free_memory()


def test_means_over_other_items(group):
    for zero in (0, 3):
        ranks(group, 2)(words_case, zero)


def ignored_labels(model, x):
    """Return a mean over rows whose first number is positive, which only cross_entropy knows."""
    labels = torch.where(x[:, 0] > 0, (x[:, 1] > 0).long(), -100)
    scores = model(x).sum(1, keepdim=True) * torch.tensor([1.0, -1.0], dtype=torch.float64)
    return nn.functional.cross_entropy(scores, labels)


def labels_case(world):
    expected = net(torch.float64)
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.3)
    x = data(torch.float64, ROWS).tensors[0]
    for part in x.split(BATCH * WINDOW):
        optimizer.zero_grad()
        ignored_labels(expected, part).backward()
        optimizer.step()
    model = net(torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    accelerator = ours(exact_mean=True, gradient_accumulation_steps=WINDOW)
    loader = DataLoader(data(torch.float64, ROWS), batch_size=BATCH // world.size)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for x, _ in loader:
        with accelerator.accumulate(model):
            accelerator.backward(ignored_labels(model, x))
            optimizer.step()
            optimizer.zero_grad()
    assert distance(model, expected) < 1e-12
    accelerator.free_memory()


@pytest.mark.parametrize("size", [1, 2])
def test_what_a_loss_is_a_mean_over_is_read_from_its_graph(group, size):
    ranks(group, size)(labels_case)


def several_losses_case(world):
    """Accumulate two losses of one batch.

    The step's loss is exact, and an evaluation in between uses every sample once.
    """
    x, y = data(torch.float64, ROWS).tensors
    expected = net(torch.float64)
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    for part in (slice(0, 8), slice(8, 16), slice(16, 21)):
        optimizer.zero_grad()
        out = expected(x[part])
        ((out - y[part]).square().mean() + 0.5 * out.abs().mean()).backward()
        optimizer.step()
    accelerator = ours(exact_mean=True)
    model = net(torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(data(torch.float64, ROWS), batch_size=4)
    checks = DataLoader(data(torch.float64, 7), batch_size=3)
    model, optimizer, loader, checks = accelerator.prepare(model, optimizer, loader, checks)
    for x, y in loader:
        out = model(x)
        accelerator.backward((out - y).square().mean(), retain_graph=True)
        accelerator.backward(0.5 * out.abs().mean())
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        seen = [accelerator.gather_for_metrics(targets) for _, targets in checks]
        assert torch.equal(torch.cat(seen), data(torch.float64, 7).tensors[1])
        model.train()
    assert distance(model, expected) < 1e-12
    accelerator.free_memory()


def test_losses_of_one_batch_add_up(group):
    ranks(group, 2)(several_losses_case)


def refusals_case(world):
    accelerator = ours()
    model = net()
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x, _ = data().tensors
    with pytest.raises(UsageError, match=r"an effect only with Accelerator\(exact_mean=True\)"):
        accelerator.backward(model(x).mean(), weight=3)
    accelerator.free_memory()
    accelerator = ours(exact_mean=True)
    model = nn.Sequential(net(), nn.BatchNorm1d(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(x[:5]), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    with pytest.raises(UsageError, match="no prepared loader has returned a batch"):
        accelerator.backward(model(x).mean())
    model.eval()
    (batch,) = next(iter(loader))
    if world.rank == 1:
        with pytest.raises(UsageError, match=r"write model\.train\(\) before the loop"):
            accelerator.backward(model(batch).mean())
    accelerator.free_memory()


def test_what_cannot_be_exact_is_refused(group):
    ranks(group, 2)(refusals_case)
