"""Lightning's Trainer and Fabric on engines, compared with the stock ones in a single process."""

import copy
import itertools
import os
import warnings
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset

from shardwise.errors import ModelError, UsageError
from tests.tables import each_value

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pl = pytest.importorskip("lightning.pytorch", reason="the lightning package is not there")
    import lightning.fabric as fabric_library

SIZES = [1, 2, pytest.param(4, marks=pytest.mark.full)]
BATCH = 8
ROWS = 40
TESTED = 11
ENDS = {"fp32": 1e-5, "fp64": 1e-8}


def ranks(group, size):
    """Ranks whose generators are the script's own. To import Lightning takes seconds of CPU in
    each, and more on a busy machine."""
    return partial(group(size, reseed=False), limit=300)


@contextmanager
def calm():
    """Silence Lightning's own warnings and remove variables such as RANK."""
    before = {name: os.environ.pop(name, None) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    os.environ.update({name: value for name, value in before.items() if value is not None})


def samples(rows, seed=1):
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 4, generator=draw)
    return TensorDataset(x, x.prod(1, keepdim=True).sin())


class Model(pl.LightningModule):
    """Blocks, a separate parameter that training_step uses, and a frozen layer."""

    def __init__(self, share=1):
        super().__init__()
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)]
        self.net = nn.Sequential(nn.Linear(4, 6), *blocks, nn.Linear(6, 1))
        self.scale = nn.Parameter(torch.ones(1))
        self.fixed = nn.Linear(1, 1).requires_grad_(False)
        self.share = share
        self.seen = []

    def forward(self, x):
        return self.net(x) + self.fixed(x[:, :1])

    def loss(self, batch):
        x, y = (part.to(self.scale.dtype) for part in batch)
        return (self(x) * self.scale - y).square().mean()

    def training_step(self, batch, index):
        loss = self.loss(batch)
        self.seen.append(self.trainer.strategy.reduce(loss.detach().clone()).item())
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, index):
        loss = self.loss(batch)
        self.log("valid", loss, sync_dist=True, batch_size=len(batch[0]))
        self.log("rows", float(len(batch[0])), sync_dist=True, reduce_fx="sum")

    test_step = validation_step

    def predict_step(self, batch, index):
        return self(batch[0])

    def configure_optimizers(self):
        trained = [p for p in self.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }

    def train_dataloader(self):
        return DataLoader(samples(ROWS), batch_size=BATCH // self.share)

    def val_dataloader(self):
        return DataLoader(samples(TESTED, 2), batch_size=BATCH // self.share)

    test_dataloader = val_dataloader


class Rates(pl.Callback):
    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        self.seen.append(trainer.optimizers[0].param_groups[0]["lr"])


def trainer(strategy, callbacks=(), **options):
    """Create our Trainer or, with strategy "auto", the stock one in a single process."""
    options = {"max_epochs": 2, "logger": False, "enable_checkpointing": False} | options
    return pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        callbacks=list(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def ours(zero, **settings):
    from shardwise.lightning import ShardwiseStrategy

    return ShardwiseStrategy(zero=zero, quiet=True, **settings)


def fitted(strategy, share=1, model=None, ckpt=None, **options):
    """Return the trainer, its model and the learning rates by batch, after `fit`."""
    rates = Rates()
    with calm():
        made = trainer(strategy, [rates, *options.pop("callbacks", [])], **options)
        model = Model(share) if model is None else model
        made.fit(model, ckpt_path=ckpt, weights_only=None if ckpt is None else False)
    return made, model, rates.seen


def alike(model, expected, end=1e-5):
    for name, value in expected.state_dict().items():
        found = model.state_dict()[name]
        assert torch.allclose(found, value, rtol=100 * end, atol=end), name


# -- the Trainer ------------------------------------------------------------------------------


def parity_case(world, dtype, rows):
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.3}
    if dtype == "fp64":
        options["precision"] = "64-true"
    stock, expected, rates = fitted("auto", **options)
    for zero in rows:
        made, model, seen = fitted(ours(zero), world.size, **options)
        assert made.world_size == world.size
        assert model.seen == pytest.approx(expected.seen, rel=ENDS[dtype])
        assert seen == rates
        alike(model, expected, ENDS[dtype])
        for name in ("valid", "rows"):
            value = made.callback_metrics[name]
            assert value.item() == pytest.approx(stock.callback_metrics[name].item(), rel=1e-4)


@pytest.mark.slow
@each_value(dtype=ENDS, size=[1, 2, 4])
def test_results_of_the_stock_trainer(group, size, dtype):
    """Five batches, two to a step, clipped and scheduled; 11 samples to validate on."""
    ranks(group, size)(parity_case, dtype, range(4))


CUTS = (0, 8, 16, 22, 30, 40)
"""Boundaries of batches with different sizes: 8, 8, 6, 8, 10 rows."""


class Batches:
    """This worker's share of each batch; the first time from the batch `begun` on."""

    def __init__(self, begun, rank, size):
        self.begun, self.rank, self.size = begun, rank, size

    def __len__(self):
        return len(CUTS) - 1

    def __iter__(self):
        begun, self.begun = self.begun, 0
        for start, end in list(itertools.pairwise(CUTS))[begun:]:
            part = slice(start + self.rank, end, self.size)
            yield [tensor[part] for tensor in samples(ROWS).tensors]


class ReadsOn(Model):
    """Continues reading at the position where a resumed epoch stopped, as stateful loaders do."""

    def train_dataloader(self):
        done = self.trainer.fit_loop.epoch_loop.batch_progress.current.ready
        rank, size = self.trainer.global_rank, self.trainer.world_size
        return Batches(done % (len(CUTS) - 1), rank, size)


class States(pl.Callback):
    """The optimizer's state before the first step and after the last one."""

    def on_train_start(self, trainer, module):
        self.first = copy.deepcopy(trainer.strategy.optimizer_state(trainer.optimizers[0]))

    def on_train_end(self, trainer, module):
        self.last = trainer.strategy.optimizer_state(trainer.optimizers[0])


def resume_case(world, folder, zero, every, precision="32-true", exact=True):
    """Saved at `every` steps; what follows is the same as without a break, with an exact mean too,
    although the next batch has another size."""
    saves = pl.callbacks.ModelCheckpoint(folder, "{step}", every_n_train_steps=every, save_top_k=-1)
    states, after = States(), States()
    whole, again = ReadsOn(world.size), ReadsOn(world.size)
    options = {"num_sanity_val_steps": 0, "precision": precision}
    kept = {"callbacks": [saves, states], "enable_checkpointing": True}
    fitted(ours(zero, exact_mean=exact), world.size, whole, **kept, **options)
    world.barrier()
    path = Path(folder) / f"step={every}.ckpt"
    ending = ours(zero, exact_mean=exact)
    fitted(ending, world.size, again, path, callbacks=[after], **options)
    assert again.seen == whole.seen[every:]
    assert_same(again.state_dict(), whole.state_dict())
    assert_same(after.last, states.last)
    assert ("loss_weight_divisor" in after.last) == exact
    return whole.seen


def assert_same(found, expected):
    """To the bit, with all that `expected` has."""
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("zero", [3, pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize("every", [3, 5])
def test_a_resumed_run_goes_on_with_the_same_bits(group, tmp_path, zero, every):
    """Resume in the middle of an epoch and at its end, at a different world size, and in stock
    Lightning.
    """
    seen = ranks(group, 2)(resume_case, str(tmp_path), zero, every)[0]
    ranks(group, 1)(elsewhere_case, str(tmp_path / f"step={every}.ckpt"), seen[every:])


def elsewhere_case(world, path, expected):
    for strategy in (ours(2), "auto"):
        again = ReadsOn()
        fitted(strategy, 1, again, path, num_sanity_val_steps=0)
        assert again.seen == pytest.approx(expected, rel=1e-5)
    with calm():
        loaded = Model.load_from_checkpoint(path, weights_only=False)
    assert all(p.numel() for p in loaded.parameters())


MORE = [("bf16-mixed", 0), ("bf16-mixed", 3), ("bf16-true", 0)]


@pytest.mark.parametrize(("precision", "zero"), [("32-true", 0), *MORE])
@pytest.mark.full
def test_resumed_runs_of_every_precision(group, tmp_path, precision, zero):
    ranks(group, 2)(resume_case, str(tmp_path), zero, 3, precision)


@pytest.mark.parametrize(("zero", "exact"), [(0, False), (3, True)])
def test_a_resumed_run_in_bf16_goes_on_from_the_masters(group, tmp_path, zero, exact):
    """Resume in the middle of an epoch, at a different world size, and in stock Lightning."""
    ranks(group, 2)(resume_case, str(tmp_path), zero, 3, "bf16-true", exact)
    ranks(group, 1)(in_bf16_elsewhere_case, str(tmp_path / "step=3.ckpt"))


def in_bf16_elsewhere_case(world, path):
    """One worker starts from the saved weights. Stock Lightning has no fp32 masters."""
    saved = torch.load(path, weights_only=False)
    weights, (state,) = list(saved["state_dict"].values()), saved["optimizer_states"]
    assert all(value.dtype == torch.bfloat16 for value in weights)
    masters = state["fp32_master_weights"]
    assert masters.keys() == state["state"].keys()
    assert_same([m.bfloat16() for m in masters.values()], [weights[i] for i in masters])
    assert any((m.bfloat16() != m).any() for m in masters.values())
    for strategy in (ours(2), "auto"):
        states = States()
        options = {"precision": "bf16-true", "num_sanity_val_steps": 0, "callbacks": [states]}
        fitted(strategy, 1, ReadsOn(), path, **options)
        if strategy == "auto":
            assert states.last.keys() == {"state", "param_groups"}
            assert states.last["state"][0].keys() == state["state"][0].keys()
        else:
            assert_same(states.first, state)


def best_case(world, folder):
    """`test` and load_from_checkpoint read the best weights in full, even with ZeRO stage 3."""
    best = pl.callbacks.ModelCheckpoint(folder, monitor="valid", save_last=True)
    stops = pl.callbacks.EarlyStopping("valid", patience=3)
    rates = pl.callbacks.LearningRateMonitor("step")
    made, model, _ = fitted(
        ours(3),
        world.size,
        callbacks=[best, stops, rates],
        enable_checkpointing=True,
        max_epochs=3,
        logger=pl.loggers.CSVLogger(folder),
        log_every_n_steps=1,
    )
    with calm():
        (measured,) = made.test(model, ckpt_path="best", weights_only=False, verbose=False)
        loaded = Model.load_from_checkpoint(best.best_model_path, weights_only=False)
        rows = made.predict(model, loaded.val_dataloader())
    assert measured["valid"] == pytest.approx(best.best_model_score.item(), rel=1e-5)
    assert sum(map(len, rows)) == len(range(world.rank, TESTED, world.size))
    assert made.global_step == len(model.seen)
    alike(model, loaded)


def test_checkpoints_stopping_and_loggers(group, tmp_path):
    ranks(group, 2)(best_case, str(tmp_path))
    assert "lr-AdamW" in next(tmp_path.rglob("metrics.csv")).read_text()


class Gan(pl.LightningModule):
    """Two optimizers that manual optimization steps separately."""

    def __init__(self, share=1, toggles=True):
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
        self.judge = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 1))
        self.share, self.toggles, self.seen = share, toggles, []

    def configure_optimizers(self):
        made = torch.optim.Adam(self.generator.parameters(), 1e-2)
        judged = torch.optim.SGD(self.judge.parameters(), 1e-1, momentum=0.9)
        return [made, judged], []

    def training_step(self, batch, index):
        draws, real = batch
        first, second = self.optimizers()
        self.step(first, lambda: self.judge(self.generator(draws)).square().mean())
        fake = self.generator(draws).detach()
        self.step(second, lambda: (self.judge(fake) - self.judge(real.expand(-1, 2))).mean())

    def step(self, optimizer, loss_of):
        if self.toggles:
            self.toggle_optimizer(optimizer)
        loss = loss_of()
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(optimizer, 0.2, "norm")
        optimizer.step()
        if self.toggles:
            self.untoggle_optimizer(optimizer)
        self.seen.append(self.trainer.strategy.reduce(loss.detach().clone()).item())

    def train_dataloader(self):
        return DataLoader(samples(ROWS), batch_size=BATCH // self.share)


def gan_case(world, zero, toggles):
    _, expected, _ = fitted("auto", model=Gan(toggles=toggles))
    laid_out = []
    with counted_layouts(laid_out):
        _, model, _ = fitted(ours(zero), model=Gan(world.size, toggles))
    assert model.seen == pytest.approx(expected.seen, rel=1e-5)
    alike(model, expected)
    assert len(laid_out) == 2  # one for each engine: no state was laid out a second time


@contextmanager
def counted_layouts(found):
    from shardwise.engine.user_objects import UserObjects

    stock = UserObjects._build_states

    def counted(self, *arguments):
        found.append(self)
        stock(self, *arguments)

    UserObjects._build_states = counted
    try:
        yield
    finally:
        UserObjects._build_states = stock


@pytest.mark.parametrize("toggles", [True, False])
def test_several_optimizers_by_hand(group, toggles):
    for zero in (0, 3):
        ranks(group, 2)(gan_case, zero, toggles)


class ByHand(Model):
    """One optimizer, whose backward and step training_step makes itself."""

    def __init__(self, share=1):
        super().__init__(share)
        self.automatic_optimization = False
        self.scale.requires_grad_(False)

    def training_step(self, batch, index):
        x, y = batch
        loss = ((self(x) if index % 2 else self.net(x)) - y).square().mean()
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.seen.append(self.trainer.strategy.reduce(loss.detach().clone()).item())


def by_hand_case(world):
    _, expected, _ = fitted("auto", model=ByHand(), max_epochs=1)
    for zero in (0, 3):
        _, model, _ = fitted(ours(zero), model=ByHand(world.size), max_epochs=1)
        assert model.seen == pytest.approx(expected.seen, rel=1e-5)
        alike(model, expected)


def test_one_optimizer_by_hand(group):
    ranks(group, 2)(by_hand_case)


class Looking(Model):
    """Reads gradients before the step, and clips by value."""

    def on_before_optimizer_step(self, optimizer):
        norms = pl.utilities.grad_norm(self, norm_type=2)
        self.seen.append(norms["grad_2.0_norm_total"].item())


def hooks_case(world):
    options = {"gradient_clip_val": 1e-2, "gradient_clip_algorithm": "value"}
    _, expected, _ = fitted("auto", model=Looking(), **options)
    for zero in (1, 3):
        _, model, _ = fitted(ours(zero), model=Looking(world.size), **options)
        assert model.seen == pytest.approx(expected.seen, rel=1e-5)
        alike(model, expected)


def test_hooks_see_whole_gradients(group):
    ranks(group, 2)(hooks_case)


class WithMesh(Model):
    """A module in the form of scripts for ModelParallelStrategy."""

    def configure_model(self):
        copy.deepcopy(self._device_mesh)
        assert not hasattr(self.device_mesh, "size")
        self.net.mesh = self.device_mesh["data_parallel"]


def mesh_case(world):
    from lightning.fabric.strategies import ModelParallelStrategy as OfFabric
    from lightning.pytorch.strategies import ModelParallelStrategy

    from shardwise.lightning import adoption

    with calm(), pytest.MonkeyPatch.context() as patch:
        for kind in (pl.Trainer, fabric_library.Fabric):
            patch.setattr(kind, "__init__", kind.__init__)
        adoption._replace("lightning.pytorch", "Trainer", adoption.trainer_strategy)
        adoption._replace("lightning.fabric", "Fabric", adoption.fabric_strategy)
        with pytest.raises(UsageError, match=r"mesh\['data_parallel'\] belongs to Mod.*--zero 3"):
            trainer(ModelParallelStrategy()).fit(WithMesh(world.size))
        fabric = fabric_library.Fabric(
            accelerator="cpu", devices=2, strategy=OfFabric(lambda model, mesh: model)
        )
        with pytest.raises(UsageError, match=r"strategy.device_mesh belongs to ModelParallelStr"):
            fabric.strategy.device_mesh  # noqa: B018
        assert not hasattr(fabric.strategy, "device_mesh")
        assert Model().device_mesh is None


def test_scripts_that_ask_for_a_device_mesh_are_told_what_to_write(group):
    ranks(group, 2)(mesh_case)


def states_case(world, sharded):
    """Full states are on rank 0 only if the script's strategy is FSDPStrategy."""
    from lightning.pytorch.strategies import FSDPStrategy

    from shardwise.lightning import adoption

    kind = "sharded" if sharded else "full"
    with calm(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(pl.Trainer, "__init__", pl.Trainer.__init__)
        adoption._replace("lightning.pytorch", "Trainer", adoption.trainer_strategy)
        for strategy in ("ddp", FSDPStrategy(state_dict_type=kind)):
            states, whole = States(), world.is_main or sharded or strategy == "ddp"
            fit = trainer(strategy, max_epochs=1, callbacks=[states])
            fit.fit(Model(world.size))
            assert bool(states.first) == bool(states.last) == whole
            assert bool(fit.strategy.lightning_module_state_dict()) == whole


@pytest.mark.parametrize("sharded", [False, True], ids=["full", "sharded"])
def test_states_are_on_the_ranks_where_the_scripts_strategy_has_them(group, sharded):
    ranks(group, 2)(states_case, sharded)


class WithoutOptimizer(Model):
    """No optimizer: the module uses the gradients itself."""

    def configure_optimizers(self):
        return None

    def on_after_backward(self):
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.grad is not None:
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None


def no_optimizer_case(world):
    with calm():
        expected = WithoutOptimizer()
        trainer("auto", max_epochs=1).fit(expected)
        for zero in (0, 3):
            model = WithoutOptimizer(world.size)
            trainer(ours(zero), max_epochs=1).fit(model)
            alike(model, expected)


def test_a_module_without_an_optimizer_has_averaged_gradients(group):
    ranks(group, 2)(no_optimizer_case)


class Falling(Sampler):
    """A curriculum: the last sample first, in the second epoch the first one."""

    def __init__(self):
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return 12

    def __iter__(self):
        return iter(range(12) if self.epoch else range(11, -1, -1))


class Ordered(pl.LightningModule):
    def __init__(self, **options):
        super().__init__()
        self.layer, self.options, self.rows = nn.Linear(1, 1), options, []

    def training_step(self, batch, index):
        self.rows += batch.flatten().int().tolist()
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.0)

    def train_dataloader(self):
        return DataLoader(torch.arange(12.0).view(12, 1), batch_size=2, **self.options)


def order_case(world):
    """Return the rows of all workers by epoch, in their common order."""
    found = []
    for options in ({"sampler": Falling()}, {}, {"shuffle": True}):
        with calm():
            model = Ordered(**options)
            trainer(ours(0)).fit(model)
        ranks_rows = world.gather(model.rows)
        found.append([row for rows in zip(*ranks_rows, strict=True) for row in rows])
    return found


def test_only_shuffle_true_shuffles(group):
    falling, plain, shuffled = ranks(group, 2)(order_case)[0]
    assert falling == [*range(11, -1, -1), *range(12)]
    assert plain == [*range(12), *range(12)]
    assert sorted(shuffled[:12]) == list(range(12)) != shuffled[:12]


class Endless(IterableDataset):
    """Each worker's own rows of a stream."""

    def __init__(self, rank, size):
        self.rows = [samples(ROWS)[i] for i in range(rank, ROWS, size)]

    def __iter__(self):
        return iter(self.rows)


class Streamed(Model):
    def train_dataloader(self):
        rank, size = self.trainer.global_rank, self.trainer.world_size
        return DataLoader(Endless(rank, size), batch_size=BATCH // self.share)

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], 0.1)

    def configure_model(self):
        self.late = nn.Linear(1, 1)


def streams_case(world):
    for options in ({}, {"precision": "bf16-mixed"}, {"plugins": [scaled()]}):
        end = 3e-2 if options else 1e-5  # 16 bits
        _, expected, _ = fitted("auto", model=Streamed(), **options)
        _, model, _ = fitted(ours(3), model=Streamed(world.size), **copy.deepcopy(options))
        assert model.seen == pytest.approx(expected.seen, rel=end)


def scaled():
    """fp16 with a loss scale, on the CPU."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    return pl.plugins.MixedPrecision("16-mixed", "cpu", scaler)


def test_streams_and_16_bits(group):
    ranks(group, 2)(streams_case)


def refused_case(world):
    shared = Gan()
    shared.configure_optimizers = lambda: [
        torch.optim.SGD(shared.parameters(), 0.1),
        torch.optim.SGD(shared.judge.parameters(), 0.1),
    ]
    with pytest.raises(ModelError, match="pass each parameter to one optimizer"):
        fitted(ours(1), model=shared)
    split = Gan()
    split.configure_optimizers = lambda: [
        torch.optim.SGD([split.judge[0].weight, *split.generator.parameters()], 0.1),
        torch.optim.SGD([split.judge[0].bias], 0.1),
    ]
    with pytest.raises(UsageError, match=r"judge\.0\.weight is in Linear together with"):
        fitted(ours(1), model=split)
    with calm(), pytest.raises(UsageError, match=r"devices=3, .* shardwise run -n 3 script\.py"):
        pl.Trainer(accelerator="cpu", devices=3, strategy="shardwise")
    with calm(), pytest.raises(UsageError, match="zer0"):
        trainer(ours(1, zer0=1))
    with calm():
        finder = trainer(ours(1), [pl.callbacks.BatchSizeFinder()])
    theirs = pl.utilities.exceptions.MisconfigurationException
    with calm(), pytest.raises(theirs, match="not supported with distributed strategies"):
        finder.fit(Model())


def test_what_is_refused(group):
    ranks(group, 1)(refused_case)


# -- Fabric -----------------------------------------------------------------------------------


def looped(fabric, share=1, folder=None, start=None, dtype=torch.float32, weighs=False):
    """Losses and norms of a loop with Fabric, and the model. With `weighs` losses of later batches
    count more.

    After steps 2 and 4 it saves FOLDER/step=2.ckpt and step=4.ckpt.
    """
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2)]
    model = nn.Sequential(nn.Linear(4, 6), *blocks, nn.Linear(6, 1)).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(DataLoader(samples(ROWS), batch_size=BATCH // share))
    state = {"optimizer": optimizer, "model": model, "step": 0}
    if start:
        fabric.load(start, state, weights_only=False)
    seen = []
    for number, (x, y) in enumerate(loader):
        if number < state["step"]:
            continue
        window = number % 2 == 0
        with fabric.no_backward_sync(model, enabled=window):
            loss = (model(x.to(dtype)) - y).square().mean()
            fabric.backward(loss / 2, **({"weight": 3 + number} if weighs else {}))
        seen.append(fabric.all_reduce(loss.detach().clone()).item())
        if not window:
            norm = fabric.clip_gradients(model, optimizer, max_norm=0.1)
            optimizer.step()
            optimizer.zero_grad()
            seen.append(norm.item())
            state["step"] = number + 1
            if folder:
                fabric.save(f"{folder}/step={state['step']}.ckpt", state)
    return seen, fabric.strategy.get_module_state_dict(model.module)


def fabric_case(world, folder):
    from shardwise.lightning import ShardwiseFabricStrategy

    made = partial(launched, "32-true")

    with calm():
        expected, weights = looped(made("auto"))
        for zero in range(4):
            ours = made(ShardwiseFabricStrategy(zero=zero, quiet=True))
            seen, state = looped(ours, world.size, folder)
            assert seen == pytest.approx(expected, rel=1e-5)
            for name, value in state.items():
                assert torch.allclose(value, weights[name], atol=1e-5), name
            ours.strategy.training.close()
            again = made(ShardwiseFabricStrategy(zero=zero, quiet=True))
            resumed, last = looped(again, world.size, start=f"{folder}/step=2.ckpt")
            assert resumed == seen[3:]
            assert all(torch.equal(last[name], state[name]) for name in state)
            again.strategy.training.close()


def adopted_case(world):
    """Run a script for `fabric run`, which does not call launch, then a script that does."""
    from shardwise.lightning import adoption

    with calm(), pytest.MonkeyPatch.context() as patch:
        fabric = fabric_library.Fabric(accelerator="cpu", devices=1)
        fabric.launch()
        expected, _ = looped(fabric)
        patch.setattr(fabric_library.Fabric, "__init__", fabric_library.Fabric.__init__)
        adoption._replace("lightning.fabric", "Fabric", adoption.fabric_strategy)
        for launches in (False, True):
            fabric = fabric_library.Fabric(accelerator="cpu", devices=2, strategy="fsdp")
            if launches:
                fabric.launch()
            seen, _ = looped(fabric, world.size)
            assert seen == pytest.approx(expected, rel=1e-5)
            fabric.strategy.training.close()


def test_fabrics_scripts_need_no_launch(group):
    ranks(group, 2)(adopted_case)


def fabric_doubles_case(world):
    from shardwise.lightning import ShardwiseFabricStrategy

    def seen_by(strategy, share=1):
        fabric = fabric_library.Fabric(accelerator="cpu", devices=1, strategy=strategy)
        fabric.launch()
        found = looped(fabric, share, dtype=torch.float64)
        return fabric, *found

    with calm():
        _, expected, weights = seen_by("auto")
        for zero in range(4):
            strategy = ShardwiseFabricStrategy(zero=zero, quiet=True)
            ours, seen, state = seen_by(strategy, world.size)
            assert seen == pytest.approx(expected, rel=1e-8)
            for name, value in state.items():
                assert torch.allclose(value, weights[name], rtol=0, atol=1e-8), name
            ours.strategy.training.close()


@pytest.mark.parametrize("size", SIZES[1:])
def test_fabric_in_fp64(group, size):
    ranks(group, size)(fabric_doubles_case)


@pytest.mark.parametrize("size", SIZES)
def test_results_of_stock_fabric(group, tmp_path, size):
    ranks(group, size)(fabric_case, str(tmp_path))


def launched(precision, strategy):
    fabric = fabric_library.Fabric(
        accelerator="cpu", devices=1, strategy=strategy, precision=precision
    )
    fabric.launch()
    return fabric


def fabric_resumed_case(world, folder, precision, zero, exact):
    """The last save of a resumed run is identical to that of an uninterrupted run."""
    from shardwise.lightning import ShardwiseFabricStrategy

    def run(name, start=None):
        strategy = ShardwiseFabricStrategy(zero=zero, quiet=True, exact_mean=exact)
        ours = launched(precision, strategy)
        seen, _ = looped(ours, world.size, f"{folder}/{name}", start, weighs=exact)
        ours.strategy.training.close()
        return seen, torch.load(f"{folder}/{name}/step=4.ckpt", weights_only=False)

    with calm():
        whole, last = run("whole")
        resumed, end = run("resumed", f"{folder}/whole/step=2.ckpt")
    assert resumed == whole[3:]
    assert_same(end, last)
    assert ("loss_weight_divisor" in last["optimizer"]) == exact
    if precision == "bf16-true":
        assert last["model"]["0.weight"].dtype == torch.bfloat16
        assert last["optimizer"]["fp32_master_weights"][0].dtype == torch.float32


@pytest.mark.parametrize(
    ("precision", "zero", "exact"),
    [
        ("bf16-true", 0, False),
        ("bf16-true", 3, True),
        ("32-true", 0, True),
        *(pytest.param(*each, True, marks=pytest.mark.full) for each in MORE),
        pytest.param("32-true", 3, True, marks=pytest.mark.full),
    ],
)
def test_a_resumed_fabric_goes_on_with_the_same_bits(group, tmp_path, precision, zero, exact):
    """This includes an exact mean, although losses of the next step have a higher weight."""
    ranks(group, 2)(fabric_resumed_case, str(tmp_path), precision, zero, exact)
