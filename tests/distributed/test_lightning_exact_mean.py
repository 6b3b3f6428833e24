"""`exact_mean` of Lightning's strategies: every sample counts once, as in plain PyTorch."""

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from shardwise.errors import UsageError
from tests.distributed.test_lightning import calm, fabric_library, ours, pl, ranks, samples, trainer

BATCH, WINDOW = 8, 2
"""Steps of 16 samples: of 21, 18 and 17 the last window is short, and its batches are uneven."""
END = 1e-12


def net():
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2)]
    return nn.Sequential(nn.Linear(4, 6), *blocks, nn.Linear(6, 1)).double()


def kept(x):
    """Return which elements count in a loss that averages a different number of them per row."""
    return x > x.sum(1, keepdim=True) / 3


def plain(rows, *, step=BATCH * WINDOW, epochs=2, loss_of=None):
    """Gradient norms by step, and the net in the end, of plain PyTorch."""
    model, norms = net(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    x, y = (part.double() for part in samples(rows).tensors)
    for _ in range(epochs):
        for first in range(0, rows, step):
            optimizer.zero_grad()
            part = slice(first, first + step)
            (loss_of or mean_of_rows)(model, x[part], y[part]).backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1e9).item())
            optimizer.step()
    return norms, model


def mean_of_rows(model, x, y):
    return (model(x) - y).square().mean()


def mean_of_elements(model, x, y):
    return ((model(x) - x).square() * kept(x)).sum() / kept(x).sum()


class Module(pl.LightningModule):
    def __init__(self, rows, batch, loss_of=mean_of_rows, weigh=None):
        super().__init__()
        self.net, self.rows, self.batch, self.loss_of = net(), rows, batch, loss_of
        self.automatic_optimization = weigh is None
        self.weigh = weigh

    def training_step(self, batch, index):
        x, y = (part.double() for part in batch)
        if self.automatic_optimization:
            return self.loss_of(self.net, x, y)
        self.manual_backward(self.loss_of(self.net, x, y), **self.weigh(x))
        if index % WINDOW == WINDOW - 1 or self.trainer.is_last_batch:
            self.optimizers().step()
        return None

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.3)

    def train_dataloader(self):
        return DataLoader(samples(self.rows), batch_size=self.batch)


def fitted(module, zero, exact_mean, **options):
    with calm():
        made = trainer(ours(zero, exact_mean=exact_mean), **options)
        made.fit(module)
    return module.net


def far(model, expected):
    pairs = zip(model.parameters(), expected.parameters(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


def trainer_case(world, zero, rows):
    """Lightning's own mean differs. The exact mean matches plain PyTorch."""
    each = BATCH // world.size
    _, expected = plain(rows)
    options = {"accumulate_grad_batches": WINDOW}
    assert far(fitted(Module(rows, each), zero, False, **options), expected) > 1e-4
    assert far(fitted(Module(rows, each), zero, True, **options), expected) < END


@pytest.mark.parametrize("size", [1, 2, pytest.param(4, marks=pytest.mark.full)])
def test_means_of_plain_pytorch(group, size):
    """In the last batches rank 1 has one sample less, or none."""
    for zero, rows in ((0, 21), (3, 17)):
        ranks(group, size)(trainer_case, zero, rows)


def elements_case(world):
    """Means over other items: counted by a function, or said at each backward."""
    each, options = BATCH // world.size, {"max_epochs": 1}
    _, expected = plain(21, step=BATCH, epochs=1, loss_of=mean_of_elements)
    counted = Module(21, each, mean_of_elements)
    count = lambda batch: kept(batch[0].double()).sum()  # noqa: E731
    assert far(fitted(counted, 3, count, **options), expected) < END
    _, expected = plain(17, epochs=1, loss_of=mean_of_elements)
    said = Module(17, each, mean_of_elements, lambda x: {"weight": kept(x).sum()})
    assert far(fitted(said, 0, True, **options), expected) < END


def test_means_over_other_items(group):
    ranks(group, 2)(elements_case)


class Streamed(Module):
    """Each worker's own rows of a stream, which Lightning reads ahead by a batch."""

    def train_dataloader(self):
        rank, size = self.trainer.global_rank, self.trainer.world_size
        return DataLoader(Stream(range(rank, self.rows, size)), batch_size=self.batch)


class Stream(IterableDataset):
    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        x, y = samples(21).tensors
        return ((x[row], y[row]) for row in self.rows)


def stream_case(world):
    """Train on a stream, and then manually accumulate two losses of one batch."""
    _, expected = plain(21)
    streamed = Streamed(21, BATCH // world.size)
    assert far(fitted(streamed, 3, True, accumulate_grad_batches=WINDOW), expected) < END
    _, expected = plain(21, epochs=1, loss_of=lambda *batch: 3 * mean_of_rows(*batch))
    twice = Twice(21, BATCH // world.size, weigh=lambda x: {})
    assert far(fitted(twice, 0, True, max_epochs=1), expected) < END


class Twice(Module):
    def training_step(self, batch, index):
        x, y = (part.double() for part in batch)
        self.manual_backward(2 * mean_of_rows(self.net, x, y))
        return super().training_step(batch, index)


def test_streams_and_several_losses(group):
    ranks(group, 2)(stream_case)


def fabric_looped(fabric, rows, each, loss_of, weigh, *, evaluates=False):
    """Norms by step and the weights, by Fabric; nothing is divided by the window."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    model, optimizer = fabric.setup(model, optimizer)
    loader = DataLoader(samples(rows), batch_size=each)
    loader = fabric.setup_dataloaders(loader)
    norms = []
    for _ in range(2):
        model.train()
        for number, batch in enumerate(loader):
            x, y = (part.double() for part in batch)
            fabric.backward(loss_of(model, x, y), **weigh(x))
            if number % WINDOW == WINDOW - 1 or number == len(loader) - 1:
                norms.append(fabric.clip_gradients(model, optimizer, max_norm=1e9).item())
                optimizer.step()
                optimizer.zero_grad()
        if evaluates:  # as Fabric shares it out: as many rows on every rank
            model.eval()
            assert len({fabric.all_gather(len(x)).sum().item() for x, _ in loader}) <= 2
    return norms, fabric.strategy.get_module_state_dict(model.module)


def fabric_made(zero, exact_mean):
    from shardwise.lightning import ShardwiseFabricStrategy

    strategy = ShardwiseFabricStrategy(zero=zero, quiet=True, exact_mean=exact_mean)
    fabric = fabric_library.Fabric(accelerator="cpu", devices=1, strategy=strategy)
    fabric.launch()
    return fabric


def fabric_case(world, zero, rows, loss_of, weigh):
    norms, expected = plain(rows, loss_of=loss_of)
    with calm():
        fabric = fabric_made(zero, True)
        found, weights = fabric_looped(
            fabric, rows, BATCH // world.size, loss_of, weigh, evaluates=True
        )
        fabric.strategy.training.close()
    assert found == pytest.approx(norms, rel=1e-10)
    for name, value in weights.items():
        assert torch.allclose(value, expected.state_dict()[name], rtol=0, atol=END), name


def unsaid(x):
    return {}


def said(x):
    return {"weight": int(kept(x).sum())}


@pytest.mark.parametrize("size", [1, 2, pytest.param(4, marks=pytest.mark.full)])
def test_fabrics_means(group, size):
    ranks(group, size)(fabric_case, 3, 17, mean_of_rows, unsaid)
    ranks(group, size)(fabric_case, 0, 21, mean_of_elements, said)


def refusals_case(world):
    with calm():
        fabric = fabric_made(0, False)
        model = net()
        model, _ = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.3))
        x = torch.ones(2, 4).double()
        with pytest.raises(UsageError, match=r"an effect only with the strategy's exact_mean"):
            fabric.backward(model(x).mean(), weight=2)
        fabric.strategy.training.close()
        fabric = fabric_made(0, True)
        model = net()
        model, _ = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.3))
        with pytest.raises(UsageError, match=r"no loader that was set up .*fabric\.backward\(loss"):
            fabric.backward(model(x).mean())
        model.eval()
        loader = fabric.setup_dataloaders(DataLoader(samples(5), batch_size=4))
        (batch,) = [x.double() for x, _ in loader]
        if world.rank == 1:
            with pytest.raises(UsageError, match=r"write model\.train\(\) before the loop"):
                fabric.backward(model(batch).mean())

        class Kind(BatchSampler):
            pass

        rows = Kind(SequentialSampler(range(5)), 2, drop_last=False)
        with pytest.raises(UsageError, match="a loader with Kind"):
            fabric.setup_dataloaders(DataLoader(samples(5), batch_sampler=rows))
        fabric.strategy.training.close()


def test_what_cannot_be_exact_is_refused(group):
    ranks(group, 2)(refusals_case)


def test_a_batch_without_rows_is_asked_about():
    from shardwise.lightning.sharing import LoadedBatches

    for batch, rows in (
        ({"texts": ["a", "b"], "scale": torch.tensor(1.0)}, 0),
        ([torch.ones(4)], 4),
    ):
        exact = LoadedBatches("engine.step()", None, lambda: True)
        exact.set_current_batch(batch)
        if rows:
            assert exact.batch_of_loss().samples == rows
            continue
        with pytest.raises(UsageError, match="without a tensor that has rows"):
            exact.batch_of_loss()
        counted = LoadedBatches("engine.step()", lambda batch: len(batch["texts"]), lambda: True)
        counted.set_current_batch(batch)
        assert counted.items(None, None).number == 2
