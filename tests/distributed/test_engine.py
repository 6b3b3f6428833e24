"""The engine, apart from parity: habits of user code are right, or refused with their name."""

import copy
import dataclasses
import io
import math
import pickle
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.comm import hybrid_shard
from shardwise.errors import (
    BrokenView,
    ConfigError,
    GradientAccess,
    ModelError,
    ModelMismatch,
    NonFiniteError,
    PlacementError,
    UsageError,
)
from shardwise.model.compilation import CompiledForward
from tests.tables import each_value

ROWS = [0, 1, 2, 3]


def mlp(dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 5), nn.Tanh(), nn.Linear(5, 2)
    ).to(dtype)


def batch(step, rows=8, width=6, dtype=torch.float64):
    draw = torch.Generator().manual_seed(1000 + step)
    return torch.randn(rows, width, generator=draw, dtype=dtype)


def close(a, b, tolerance=1e-9):
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance)


def same_weights(model, plain, tolerance=1e-9):
    pairs = zip(model.state_dict().items(), plain.state_dict().values(), strict=True)
    for (name, mine), theirs in pairs:
        assert close(mine, theirs, tolerance), f"{name}: {(mine - theirs).abs().max()}"


def train(world, model, loss_of, *, steps=5, zero=1, optimizer=None, **settings):
    """Train a few steps on this rank's rows, and return the engine."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = sw.Engine(model, optimizer, zero=zero, bucket_mb=0.001, **settings)
    for step in range(steps):
        engine.backward(loss_of(model, world.share(batch(step)), step, world.rank))
        engine.step()
    return engine


def train_plain(model, loss_of_rank, *, size, steps=5, optimizer=None):
    """Train in a single process, calling `loss_of_rank` for each rank's rows."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        optimizer.zero_grad()
        rows = batch(step)
        cuts = [len(rows) * rank // size for rank in range(size + 1)]
        for rank in range(size):
            part = rows[cuts[rank] : cuts[rank + 1]]
            (loss_of_rank(model, part, step, rank) * len(part) / len(rows)).backward()
        optimizer.step()


def agree(world, zero, make, loss_of, **options):
    """Assert that training `make()` on all ranks and in a single process gives the same weights."""
    model, plain = make(), make()
    engine = train(world, model, loss_of, zero=zero, **options)
    train_plain(plain, loss_of, size=world.size)
    with engine.full_parameters():
        same_weights(model, plain)


def squares(model, x, step, rank):
    return model(x).square().mean()


# -- models of every kind -------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.mix = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        tokens = (x.abs() * 10).long().clamp(max=10)
        return self.head(self.mix(self.embed(tokens)).tanh())


class Branches(nn.Module):
    """A model whose branch depends on the rank and the step; one branch never runs."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(6, 6)
        self.branches = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.never = nn.Linear(6, 6)

    def forward(self, x, which):
        return self.branches[which](self.stem(x).tanh())


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = nn.Linear(6, 6)
        self.out = nn.Linear(6, 1)

    def forward(self, x):
        return self.out(self.block(self.block(x).tanh()).tanh())


class Recomputed(nn.Module):
    """A block used twice under reentrant checkpointing, so its gradient arrives twice."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(6, 6)
        self.block = nn.Linear(6, 6)

    def forward(self, x, times=2):
        x = self.stem(x)
        for _ in range(times):
            x = torch.utils.checkpoint.checkpoint(self.block, x, use_reentrant=True).tanh()
        return x


def seeded(make):
    torch.manual_seed(3)
    return make().double()


def tied_case(world, zero):
    agree(world, zero, lambda: seeded(Tied), squares)


def branches_case(world, zero):
    def loss_of(model, x, step, rank):
        return model(x, (rank + step) % 3 if step != 2 else 3).square().mean()

    agree(world, zero, lambda: seeded(Branches), loss_of)


def never_used_keeps_its_value(world, zero):
    model = seeded(Branches)
    before = model.never.weight.clone()
    engine = train(world, model, lambda m, x, s, r: m(x, 0).square().mean(), zero=zero)
    with engine.full_parameters():
        assert torch.equal(model.never.weight, before)
    state = engine.optimizer_state_dict()["state"]
    assert 0 in state
    assert all(number not in state for number in range(4, 12)), sorted(state)


def twice_case(world, zero):
    agree(world, zero, lambda: seeded(Twice), squares)


def reentrant_case(world, zero):
    def loss_of(model, x, step, rank):
        # From the third step on, the block runs more often than in the steps before.
        return model(x, times=2 if step < 2 else 3).square().mean()

    agree(world, zero, lambda: seeded(Recomputed), loss_of)


def frozen_case(world, zero):
    def make():
        model = mlp()
        model[2].requires_grad_(False)
        return model

    agree(world, zero, make, squares)


@each_value(
    case=[
        tied_case,
        branches_case,
        never_used_keeps_its_value,
        twice_case,
        reentrant_case,
        frozen_case,
    ],
    zero=ROWS,
)
def test_models_of_every_kind(group, case, zero):
    group(2)(case, zero)


def test_branches_on_three_ranks(group):
    group(3)(branches_case, 2)


def channels_last_case(world):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(2)).double()
    model(torch.zeros(1, 3, 5, 5, dtype=torch.float64))
    model = model.to(memory_format=torch.channels_last)
    plain = copy.deepcopy(model)
    engine = sw.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), zero=1)
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(3):
        x = batch(step, 4, 75).view(4, 3, 5, 5).to(memory_format=torch.channels_last)
        engine.backward(model(world.share(x)).square().mean())
        engine.step()
        optimizer.zero_grad()
        plain(x).square().mean().backward()
        optimizer.step()
    same_weights(model, plain)
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)


def complex_case(world):
    def make():
        torch.manual_seed(0)
        model = nn.Module()
        model.w = nn.Parameter(torch.randn(6, 4, dtype=torch.complex128))
        return model

    def loss_of(model, x, step, rank):
        return (x.to(torch.complex128) @ model.w).abs().square().mean()

    agree(world, 1, make, loss_of)


def double_backward_case(world):
    def loss_of(model, x, step, rank):
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return slope.square().sum(1).mean()

    agree(world, 2, mlp, loss_of)


def muon_and_adamw_case(world, zero):
    def split(model):
        matrices = [p for p in model.parameters() if p.ndim == 2]
        rest = [p for p in model.parameters() if p.ndim != 2]
        return [torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(rest, lr=1e-2)]

    # Muon orthogonalises in bf16, so the order of sums changes its results more than others'.
    model, plain = mlp(torch.float32), mlp(torch.float32)
    engine = sw.Engine(model, split(model), zero=zero, bucket_mb=0.001)
    optimizers = split(plain)
    for step in range(4):
        x = batch(step, dtype=torch.float32)
        engine.backward(model(world.share(x)).square().mean())
        engine.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        plain(x).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    with engine.full_parameters():
        same_weights(model, plain, 2e-3)


def adafactor_case(world, zero):
    model, plain = mlp(), mlp()
    adafactor = torch.optim.Adafactor(model.parameters())
    engine = train(world, model, squares, zero=zero, optimizer=adafactor)
    optimizer = torch.optim.Adafactor(plain.parameters())
    train_plain(plain, squares, size=world.size, optimizer=optimizer)
    with engine.full_parameters():
        same_weights(model, plain)


def test_channels_last_is_kept(group):
    group(2)(channels_last_case)


def test_complex_parameters(group):
    group(2)(complex_case)


def test_double_backward(group):
    group(2)(double_backward_case)


@pytest.mark.parametrize("zero", ROWS)
@pytest.mark.parametrize("case", [muon_and_adamw_case, adafactor_case])
def test_optimizers_that_need_whole_tensors(group, case, zero):
    group(3)(case, zero)


class AcrossTensors(torch.optim.Optimizer):
    """Scales every update by the norm over all parameters, as Prodigy's estimate does."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            members = [p for p in group["params"] if p.grad is not None]
            norm = torch.stack([p.grad.norm() for p in members]).norm()
            for p in members:
                p.sub_(p.grad, alpha=float(group["lr"] / norm))


def across_tensors_case(world):
    model = mlp()
    with pytest.raises(
        ModelError, match=r"AcrossTensors combines values of several tensors.*--zero 0"
    ):
        sw.Engine(model, AcrossTensors(model.parameters()), zero=1)
    world.engines = 0
    model, plain = mlp(), mlp()
    train(world, model, squares, zero=0, optimizer=AcrossTensors(model.parameters()))
    train_plain(plain, squares, size=2, optimizer=AcrossTensors(plain.parameters()))
    same_weights(model, plain)


def test_an_optimizer_that_looks_across_tensors(group):
    group(2)(across_tensors_case)


# -- several engines, several models --------------------------------------------------------------


def gan_case(world):
    def make():
        torch.manual_seed(0)
        return nn.Linear(6, 6).double(), nn.Linear(6, 1).double()

    (g, d), (pg, pd) = make(), make()
    eg = sw.Engine(g, torch.optim.SGD(g.parameters(), lr=0.1), zero=2)
    ed = sw.Engine(d, torch.optim.SGD(d.parameters(), lr=0.1), zero=1)
    og, od = torch.optim.SGD(pg.parameters(), lr=0.1), torch.optim.SGD(pd.parameters(), lr=0.1)
    for step in range(3):
        x = world.share(batch(step))
        ed.backward((d(x) - d(g(x).detach())).mean())
        ed.step()
        eg.backward(d(g(x)).mean())
        assert d.weight.grad is None, "the generator's backward touched the discriminator"
        eg.step()
        x = batch(step)
        od.zero_grad()
        (pd(x) - pd(pg(x).detach())).mean().backward()
        od.step()
        og.zero_grad()
        pd(pg(x)).mean().backward()
        og.step()
    same_weights(g, pg)
    same_weights(d, pd)


def one_loss_two_engines_case(world):
    def make():
        torch.manual_seed(0)
        return nn.Linear(6, 4).double(), nn.Linear(4, 1).double()

    (a, b), (pa, pb) = make(), make()
    ea = sw.Engine(a, torch.optim.SGD(a.parameters(), lr=0.1), zero=2)
    eb = sw.Engine(b, torch.optim.AdamW(b.parameters(), lr=0.1), zero=0)
    oa, ob = torch.optim.SGD(pa.parameters(), lr=0.1), torch.optim.AdamW(pb.parameters(), lr=0.1)
    for step in range(3):
        loss = b(a(world.share(batch(step)))).square().mean()
        ea.backward(loss, retain_graph=True)
        eb.backward(loss)
        ea.step()
        eb.step()
        oa.zero_grad()
        ob.zero_grad()
        pb(pa(batch(step))).square().mean().backward()
        oa.step()
        ob.step()
    same_weights(a, pa)
    same_weights(b, pb)


def several_models_case(world):
    def make():
        torch.manual_seed(0)
        return nn.Linear(6, 4).double(), nn.Linear(4, 1).double()

    (a, b), (pa, pb) = make(), make()
    optimizer = torch.optim.AdamW([*a.parameters(), *b.parameters()], lr=0.1)
    engine = sw.Engine([a, b], optimizer, zero=2)
    plain = torch.optim.AdamW([*pa.parameters(), *pb.parameters()], lr=0.1)
    for step in range(3):
        engine.backward(b(a(world.share(batch(step)))).square().mean())
        engine.step()
        plain.zero_grad()
        pb(pa(batch(step))).square().mean().backward()
        plain.step()
    same_weights(a, pa)
    same_weights(b, pb)


@pytest.mark.parametrize("case", [gan_case, one_loss_two_engines_case, several_models_case])
def test_several_at_once(group, case):
    group(2)(case)


# -- the model stays usable -----------------------------------------------------------------------


def plain_copies_case(world, folder):
    model = mlp(torch.float32)
    keys, kind = list(model.state_dict()), type(model)
    train(world, model, lambda m, x, s, r: m(x.float()).square().mean(), zero=2)
    assert type(model) is kind
    assert list(model.state_dict()) == keys
    for name, twin in {
        "deepcopy": copy.deepcopy(model),
        "pickle": pickle.loads(pickle.dumps(model)),
        "average": torch.optim.swa_utils.AveragedModel(model).module,
    }.items():
        same_weights(twin, model)
        optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
        twin(batch(0).float()).sum().backward()  # a plain model: no engine watches it
        optimizer.step()
        assert not close(twin[0].weight, model[0].weight), name
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    fresh = mlp(torch.float32, seed=9)
    fresh.load_state_dict(torch.load(file, weights_only=True))
    same_weights(fresh, model)


def test_copies_are_plain_models(group, tmp_path):
    group(2)(plain_copies_case, str(tmp_path))


def export_and_load(world, folder):
    import safetensors.torch

    torch.manual_seed(0)
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = sw.Engine(model, optimizer, zero=1, ema_decay=0.5)
    average = copy.deepcopy(model.state_dict())
    for step in range(3):
        engine.backward(model(world.share(batch(step))).square().mean())
        engine.step()
        for name, value in model.state_dict().items():
            if name != "head.weight":  # the same memory as embed.weight
                average[name].lerp_(value, 0.5)
    engine.export(f"{folder}/model.safetensors")
    engine.export(f"{folder}/model.pt")
    with engine.ema():
        engine.export(f"{folder}/ema.safetensors")
        for name, value in model.state_dict().items():
            assert close(value, average[name], 1e-6), name
    world.barrier()
    for file, expected in (("model", model.state_dict()), ("ema", average)):
        fresh = Tied()
        safetensors.torch.load_model(fresh, f"{folder}/{file}.safetensors")
        for name, value in fresh.state_dict().items():
            assert close(value, expected[name], 1e-6), name
        assert fresh.head.weight is fresh.embed.weight
    loaded = torch.load(f"{folder}/model.pt", weights_only=True)
    assert loaded.keys() == model.state_dict().keys()
    assert all(torch.equal(loaded[name], value) for name, value in model.state_dict().items())
    engine.load(f"{folder}/model.pt")


def trial_case(world, folder):
    world.settings = dataclasses.replace(world.settings, trial=True)
    model = nn.Linear(4, 2)
    engine = sw.Engine(model, torch.optim.SGD(model.parameters()), quiet=True)
    before = sorted(Path(folder).iterdir())
    assert engine.resume(folder) == 0
    engine.backward(model(world.share(torch.ones(4, 4))).square().mean())
    engine.step()
    path = engine.save(folder, keep=1)
    assert path == Path(folder) / "step-1"
    weight = model.weight.clone()
    engine.load(path)  # the files of an earlier run are not there
    assert torch.equal(model.weight, weight)
    engine.export(f"{folder}/model.safetensors")
    world.barrier()
    assert sorted(Path(folder).iterdir()) == before


def saves_case(world, folder):
    model = nn.Linear(4, 2)
    engine = sw.Engine(model, torch.optim.SGD(model.parameters()), quiet=True)
    for _ in range(3):
        engine.backward(model(world.share(torch.ones(4, 4))).square().mean())
        engine.step()
        engine.save(folder)
    engine.close()


def test_a_trial_run_neither_saves_nor_resumes(group, tmp_path):
    group(2)(saves_case, str(tmp_path))
    group(2)(trial_case, str(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {"step-1", "step-2", "step-3"}


@pytest.mark.parametrize("size", [1, 2, 3])
def test_export_and_moving_average(group, tmp_path, size):
    group(size)(export_and_load, str(tmp_path))


def different_seeds_case(world):
    model = mlp(seed=world.rank)
    sw.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1))
    same_weights(model, mlp(seed=0))


def test_rank_0_gives_the_starting_weights(group):
    group(3)(different_seeds_case)


def write_case(world, zero):
    model = mlp(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = sw.Engine(model, optimizer, zero=zero, precision="bf16")
    with engine.full_parameters(write=True):
        model[0].weight.fill_(float(1 + world.rank))
    with engine.full_parameters():
        assert bool((model[0].weight == 1).all())
    engine.backward(model(world.share(batch(0).float())).square().mean())
    engine.step()
    with engine.full_parameters(model[0]):
        near = (model[0].weight.float() - 1).abs() < 0.3
    assert bool(near.all()), "the masters were not told"


@pytest.mark.parametrize("zero", ROWS)
def test_full_parameters_write_reaches_the_masters(group, zero):
    group(2)(write_case, zero)


# -- precision ------------------------------------------------------------------------------------


def precision_case(world, precision, zero):
    model, plain = mlp(torch.float32), mlp(torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = sw.Engine(model, optimizer, zero=zero, precision=precision)
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for step in range(8):
        x = batch(step, 16, dtype=torch.float32)
        out = model(world.share(x))
        assert out.dtype == torch.float32
        engine.backward((out - 1).square().mean())
        stats = engine.step(max_norm=10.0)
        assert not stats.skipped
        reference.zero_grad()
        loss = (plain(x) - 1).square().mean()
        loss.backward()
        reference.step()
    assert stats.loss == pytest.approx(float(loss.detach()), rel=0.05)
    expected = torch.bfloat16 if precision == "bf16" else torch.float32
    assert {p.dtype for p in model.parameters()} == {expected}
    with engine.full_parameters():
        same_weights(copy.deepcopy(model).float(), plain, 0.1)
        assert copy.deepcopy(model)(x).dtype == torch.float32
        pickle.loads(pickle.dumps(model))


@each_value(precision=["bf16-mixed", "bf16", "fp16-mixed"], zero=ROWS)
def test_presets_train_close_to_fp32(group, precision, zero):
    group(2)(precision_case, precision, zero)


def overflow_case(world, handed):
    model = mlp(torch.float32)
    before = copy.deepcopy(model.state_dict())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2) if handed else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = sw.Engine(model, optimizer, zero=1, precision="fp16-mixed", scaler=scaler)
    start = engine.loss_scale
    x = batch(0, dtype=torch.float32)
    bad = x * (1e30 if world.rank == 1 else 1.0)
    engine.backward(model(bad).square().mean())
    assert engine.step().skipped
    same_weights(model, mlp(torch.float32))
    assert engine.loss_scale == start / 2
    for _ in range(2):
        engine.backward(model(x).square().mean())
        assert not engine.step().skipped
    if handed:
        assert scaler.get_scale() == start == engine.loss_scale
    assert not torch.equal(model[0].weight, before["0.weight"])


@pytest.mark.parametrize("handed", [False, True])
def test_an_overflow_skips_the_step_on_all_ranks(group, handed):
    group(2)(overflow_case, handed)


# -- habits that would be silently wrong ----------------------------------------------------------


def habits_case(world):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", enabled=True)
    engine = sw.Engine(model, optimizer, zero=world.size % 3)
    x = batch(0)

    def loss():
        return model(x).square().mean()

    def with_clip(function):
        engine.backward(loss())
        try:
            function(model.parameters(), 1.0)
        finally:
            engine.step()

    table = [
        (lambda: optimizer.step(), UsageError, "engine.step"),
        (lambda: loss().backward(), UsageError, r"engine.backward\(loss\)"),
        (lambda: scaler.scale(loss()).backward(), UsageError, "engine.backward"),
        (lambda: engine.step(), UsageError, "call backward first"),
        (lambda: with_clip(nn.utils.clip_grad_norm_), GradientAccess, "max_norm"),
        (lambda: with_clip(nn.utils.clip_grad_value_), GradientAccess, "max_norm"),
        (lambda: engine.backward(model(x)), UsageError, "scalar loss"),
        (lambda: engine.backward(3.0), UsageError, "as a tensor, not float"),
        (lambda: engine.backward(loss().detach()), UsageError, "does not depend on any parameter"),
        (lambda: engine.backward(loss(), weight=-1), UsageError, "0 or more"),
        (lambda: engine.step(max_norm=0), UsageError, "call backward first"),
        (lambda: sw.init(), UsageError, "twice"),
    ]
    for call, error, text in table:
        with pytest.raises(error, match=text):
            call()
    engine.backward(loss())
    assert not engine.step().skipped, "the engine goes on after an error"


@pytest.mark.parametrize("size", [1, 2])
def test_refuses_lines_that_would_be_silently_wrong(group, size):
    group(size)(habits_case)


def grad_scaler_step_case(world):
    model = mlp(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    engine = sw.Engine(model, optimizer, scaler=scaler, precision="fp16-mixed")
    loss = model(batch(0).float()).square().mean()
    scaler.scale(loss)
    engine.backward(loss)
    with pytest.raises((GradientAccess, UsageError), match=r"engine\.step"):
        scaler.step(optimizer)


def test_grad_scaler_step_is_refused(group):
    group(1)(grad_scaler_step_case)


def zero_grad_is_harmless_case(world, zero):
    model, plain = mlp(), mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = sw.Engine(model, optimizer, zero=zero)
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        engine.backward(model(world.share(batch(step))).square().mean())
        engine.step()
        model.zero_grad()
        reference.zero_grad()
        plain(batch(step)).square().mean().backward()
        reference.step()
    with engine.full_parameters():
        same_weights(model, plain)
    engine.backward(model(world.share(batch(0))).square().mean())
    optimizer.zero_grad()
    with pytest.raises(UsageError, match=r"cleared between engine\.backward and engine\.step"):
        engine.step()


@pytest.mark.parametrize("zero", ROWS)
def test_refuses_zero_grad_between_backward_and_step(group, zero):
    group(2)(zero_grad_is_harmless_case, zero)


def broken_views_case(world):
    def fresh():
        model = mlp(torch.float32)
        return model, sw.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def go(model, engine):
        x = batch(0).to(next(model.parameters()).dtype)
        engine.backward(model(x).square().mean())

    model, engine = fresh()
    model.to(torch.float64)
    with pytest.raises(BrokenView, match=r"0\.weight.*torch\.float64.*before sw\.Engine"):
        go(model, engine)
    model, engine = fresh()
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    with pytest.raises(BrokenView, match=r"assign=True"):
        go(model, engine)
    model, engine = fresh()
    nn.utils.parametrizations.weight_norm(model[0])
    with pytest.raises(BrokenView, match=r"parametrization.*before sw\.Engine"):
        go(model, engine)
    model, engine = fresh()
    engine.backward(model(batch(0).float()).square().mean())
    with pytest.raises(BrokenView, match="cast or moved"):
        model.half()


def test_names_parameters_whose_storage_was_replaced(group):
    group(2)(broken_views_case)


def parametrized_before_case(world, zero):
    def make():
        model = mlp()
        nn.utils.parametrizations.weight_norm(model[0])
        return model

    agree(world, zero, make, squares)


@pytest.mark.parametrize("zero", ROWS)
def test_weight_norm_before_the_engine(group, zero):
    group(2)(parametrized_before_case, zero)


def bad_models_case(world):
    model = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(ModelError, match="no trainable parameter"):
        sw.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model = nn.Embedding(5, 3, sparse=True)
    engine = sw.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loss = model(torch.tensor([1, 2])).square().mean()
    with pytest.raises(ModelError, match="sparse=False"):
        engine.backward(loss)
    model = nn.Linear(2, 2)
    with pytest.raises(ModelError, match="LBFGS combines values of several tensors"):
        sw.Engine(model, torch.optim.LBFGS(model.parameters()), zero=1)
    with pytest.raises(PlacementError, match="nearest legal row is ZERO_2"):
        sw.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), shard=("gradients",))


def test_refuses_models_and_optimizers_it_cannot_train(group):
    group(1)(bad_models_case)


def second_engine_case(world):
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = sw.Engine(model, optimizer, zero=2)
    engine.backward(model(world.share(batch(0))).square().mean())
    engine.step()
    with pytest.raises(UsageError, match=r"0\.weight is already trained by another engine"):
        sw.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1))
    engine.close()
    plain = mlp()
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for step, (net, each) in enumerate(
        [(plain, reference), (plain, reference), (model, optimizer)]
    ):
        each.zero_grad()
        net(batch(min(step, 1))).square().mean().backward()
        each.step()
    same_weights(model, plain)
    assert optimizer.state_dict()["state"].keys() == reference.state_dict()["state"].keys()


def test_a_closed_engine_leaves_plain_objects(group):
    group(2)(second_engine_case)


def mismatch_case(world):
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2 + world.rank))
    sw.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_ranks_with_different_models(group):
    for error in group(2).errors(mismatch_case):
        assert error is not None
        kind, message = error
        assert kind == ModelMismatch.__name__
        assert "1.weight (2, 3)" in message
        assert "rank 1 has 1.weight (3, 3)" in message


# -- changes by user code -------------------------------------------------------------------------


def changes_case(world, zero):
    def run(model, optimizer, backward, step):
        for number in range(6):
            if number == 2:
                model[2].requires_grad_(True)
                optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 3e-2})
            if number == 4:
                model[0].requires_grad_(False)
            backward(model, number)
            step()

    def make():
        model = mlp()
        model[2].requires_grad_(False)
        rest = [p for p in model.parameters() if p.requires_grad]
        return model, torch.optim.AdamW(rest, lr=1e-2)

    model, optimizer = make()
    engine = sw.Engine(model, optimizer, zero=zero, bucket_mb=0.001)
    run(
        model,
        optimizer,
        lambda m, n: engine.backward(m(world.share(batch(n))).square().mean()),
        engine.step,
    )
    plain, reference = make()

    def plain_backward(m, n):
        reference.zero_grad()
        m(batch(n)).square().mean().backward()

    run(plain, reference, plain_backward, reference.step)
    with engine.full_parameters():
        same_weights(model, plain)
    mine, theirs = engine.optimizer_state_dict()["state"], reference.state_dict()["state"]
    assert {n: float(s["step"]) for n, s in mine.items()} == {
        n: float(s["step"]) for n, s in theirs.items()
    }


@pytest.mark.parametrize("zero", ROWS)
def test_new_groups_and_requires_grad(group, zero):
    group(2)(changes_case, zero)


def existing_state_case(world, zero):
    model, plain = mlp(), mlp()
    for net in (model, plain):
        net.own = torch.optim.AdamW(net.parameters(), lr=1e-2)
        for step in range(3):
            net.own.zero_grad()
            net(batch(step)).square().mean().backward()
            net.own.step()
    engine = sw.Engine(model, model.own, zero=zero)
    for step in range(3, 6):
        engine.backward(model(world.share(batch(step))).square().mean())
        engine.step()
        plain.own.zero_grad()
        plain(batch(step)).square().mean().backward()
        plain.own.step()
    with engine.full_parameters():
        same_weights(model, plain)


@pytest.mark.parametrize("zero", ROWS)
def test_existing_optimizer_state_is_taken_over(group, zero):
    group(2)(existing_state_case, zero)


# -- non-finite, empty, failing -------------------------------------------------------------------


def nonfinite_case(world):
    model = mlp()
    engine = sw.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), zero=2)
    engine.backward(model(batch(0)).square().mean())
    engine.step()
    x = batch(1)
    if world.rank == 1:
        x[3, 0] = float("nan")
    engine.backward(model(x).square().mean())
    engine.step()


def test_a_nan_stops_and_names_the_rank(group):
    for error in group(2).errors(nonfinite_case):
        assert error is not None
        assert error[0] == NonFiniteError.__name__
        assert "0.weight" in error[1]
        assert "rank 1 (its loss" in error[1]
        assert "rank 0" not in error[1]


def infinite_slope_case(world):
    """A case with a finite loss, but an infinite slope of the square root at 0."""
    model = nn.Linear(2, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    engine = sw.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), zero=0)
    out = model(torch.ones(1, 2, dtype=torch.float64))
    engine.backward(out.sqrt().mean() if world.rank == 0 else out.mean())
    engine.step()


def test_an_infinite_gradient_names_the_rank(group):
    for error in group(2).errors(infinite_slope_case):
        assert error is not None
        assert error[0] == NonFiniteError.__name__
        assert "rank 0 (its gradient" in error[1]


def skip_case(world):
    model = mlp()
    engine = sw.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), nonfinite="skip")
    engine.backward(model(batch(0) * float("nan")).square().mean())
    assert engine.step().skipped
    same_weights(model, mlp())
    engine.backward(model(batch(0)).square().mean(), weight=0)
    stats = engine.step()
    assert stats.skipped
    assert stats.weight == 0
    same_weights(model, mlp())


def test_skipped_steps_change_nothing(group):
    group(2)(skip_case)


def failing_forward_case(world):
    model, plain = mlp(), mlp()

    class Boom(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise ValueError("boom")

    engine = sw.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), zero=2)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="boom"):
        engine.backward(model[2:](Boom.apply(model[:2](batch(0)))).square().mean())
    engine.backward(model(batch(0)).square().mean())
    engine.step()
    plain(batch(0)).square().mean().backward()
    optimizer.step()
    same_weights(model, plain)


def test_continues_after_a_backward_that_raised(group):
    group(1)(failing_forward_case)


# -- schedulers, compile, buffers, randomness -----------------------------------------------------


def scheduler_case(world, before):
    model, plain = mlp(), mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2)

    def schedule(each):
        return torch.optim.lr_scheduler.CosineAnnealingLR(each, 5)

    scheduler = schedule(optimizer) if before else None
    engine = sw.Engine(model, optimizer, zero=1)
    scheduler = scheduler or schedule(optimizer)
    theirs = schedule(reference)
    for step in range(5):
        engine.backward(model(world.share(batch(step))).square().mean())
        engine.step()
        scheduler.step()
        reference.zero_grad()
        plain(batch(step)).square().mean().backward()
        reference.step()
        theirs.step()
    same_weights(model, plain)
    assert scheduler.get_last_lr() == theirs.get_last_lr()


@pytest.mark.parametrize("before", [True, False])
def test_schedulers_act_on_the_face(group, before):
    group(2)(scheduler_case, before)


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def compile_case(world, how):
    model, plain = seeded(Blocks), seeded(Blocks)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's compiler warns about its own code
        used = torch.compile(model, backend="aot_eager") if how == "before" else model
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        engine = sw.Engine(used, optimizer, zero=2, bucket_mb=0.001)
        if how == "after":
            used = torch.compile(model, backend="aot_eager")
        if how == "units":
            for block in model.blocks:
                block.compile(backend="aot_eager")
        for step in range(5):
            engine.backward(used(world.share(batch(step))).square().mean())
            engine.step()
    train_plain(plain, squares, size=world.size)
    same_weights(model, plain)


@pytest.mark.parametrize("how", ["before", "after", "units"])
def test_compile(group, how):
    group(2)(compile_case, how, limit=120)


def compiled_units_case(world):
    model, plain = seeded(Blocks), seeded(Blocks)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's compiler warns about its own code
        train(world, model, squares, zero=2, compile=True)
    assert all(isinstance(block.forward, CompiledForward) for block in model.blocks)
    assert list(model.state_dict()) == list(plain.state_dict())
    train_plain(plain, squares, size=world.size)
    same_weights(model, plain)


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch's compiler needs g++ on the CPU")
def test_units_are_compiled(group):
    group(2)(compiled_units_case, limit=240)


def buffers_case(world, zero, thawing):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    model[2].requires_grad_(not thawing)
    engine = sw.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), zero=zero)
    mean = torch.zeros(4, dtype=torch.float64)
    for step in range(4):
        x = batch(step)
        model[2].requires_grad_(
            not thawing or step > 1
        )  # the states get a new layout, not the buffers
        hidden = model[0](x).detach()
        engine.backward(model(world.share(x)).square().mean())
        engine.step()
        mean.lerp_(hidden.mean(0), 0.1)
        assert close(model[1].running_mean, mean)
        assert int(model[1].num_batches_tracked) == step + 1
    return model[1].running_var


@pytest.mark.parametrize("thawing", [False, True])
@pytest.mark.parametrize("zero", [1, 3])
def test_running_statistics_are_averaged(group, zero, thawing):
    first, second = group(2)(buffers_case, zero, thawing)
    assert torch.equal(first, second)


def dropout_case(world):
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)).double()
    engine = sw.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1))
    seen = []
    for step in range(2):
        torch.randn(step * 5)  # a draw by the script does not matter
        out = model(torch.ones(4, 6, dtype=torch.float64))
        seen.append((out == 0).tolist())
        engine.backward(out.mean())
        engine.step()
        torch.randn(3)
    return seen


def test_randomness_is_a_function_of_seed_step_and_rank(group):
    first, second = group(2)(dropout_case), group(2)(dropout_case)
    assert first[0][0] == second[0][0], "the first step is the same in every run"
    assert first[0] != first[1], "ranks draw differently"
    assert first[0][0] != first[0][1], "steps draw differently"


def raf_table(world, groups):
    return float(world.sum(torch.tensor(float(world.rank + 1)), groups))


@pytest.mark.parametrize(
    ("groups", "sums"),
    [
        ([[0, 1], [2, 3]], [3, 3, 7, 7]),
        ([[0, 1, 2], [3]], [6, 6, 6, 4]),
        ([[0, 1, 2]], [6, 6, 6, 4]),
        (None, [10, 10, 10, 10]),
    ],
)
def test_sums_over_groups_of_ranks(group, groups, sums):
    assert group(4)(raf_table, groups) == sums


def test_sum_refuses_a_rank_listed_twice(group):
    for error in group(4).errors(raf_table, [[0, 1], [1, 2]]):
        assert error == ("UsageError", error[1])
        assert "Rank 1 appears twice" in error[1]


# -- sharded within a host ------------------------------------------------------------------------


def within_host_case(world, zero):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hybrid_shard, "host_key", lambda: f"host {world.rank // 2}")
        model, plain = seeded(Tied), seeded(Tied)
        engine = train(world, model, squares, zero=zero, shard_within="host")
        train_plain(plain, squares, size=world.size)
        with engine.full_parameters():
            same_weights(model, plain)
        sharing = engine._spec.shard_group
        assert (sharing.size, sharing.copies) == ((2, 2) if zero else (4, 1))
        norms = world.gather(one_step(world, engine, model))
        assert len(set(norms)) == 1


def one_step(world, engine, model):
    engine.backward(squares(model, world.share(batch(9)), 0, 0))
    return engine.step(max_norm=1e-3).grad_norm


@pytest.mark.parametrize("zero", ROWS)
def test_sharded_within_a_host_and_replicated_between(group, zero):
    group(4)(within_host_case, zero)


def uneven_hosts_case(world):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hybrid_shard, "host_key", lambda: f"host {world.rank // 2}")
        with pytest.raises(ConfigError, match=r"same number of ranks on every host.*have 2, 1"):
            sw.Engine(model, optimizer, zero=2, shard_within="host")


def test_hosts_with_different_numbers_of_ranks(group):
    group(3)(uneven_hosts_case)


def written_with_masters(world, zero, when):
    """The next step continues from values that user code has written between steps."""

    def run(written):
        torch.manual_seed(1)
        model = nn.Linear(4, 2)
        engine = sw.Engine(
            model,
            torch.optim.SGD(model.parameters(), lr=1e-3),
            zero=zero,
            precision="bf16",
            ema_decay=0.9,
        )
        x = torch.ones(2, 4)
        for step in range(2):
            if step == 1 and written and when == "before ema":
                model.weight.detach().fill_(5.0)
                with engine.ema(), pytest.raises(UsageError, match=r"inside engine\.ema"):
                    engine.full_parameters(write=True).__enter__()
            engine.backward(model(x).mean())
            if step == 1 and written and when == "before step":
                model.weight.detach().fill_(5.0)
            engine.step()
        weight = model.weight.detach().clone()
        engine.close()
        return weight

    assert bool((run(True) > 4.9).all())
    assert bool((run(False) < 1).all())


@pytest.mark.parametrize("when", ["before ema", "before step"])
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_what_is_written_reaches_the_masters(group, zero, when):
    group(2)(written_with_masters, zero, when)


def two_losses_of_one_batch(world, zero):
    """Two losses of one batch, each a mean over it, are added as in plain PyTorch."""
    data = torch.utils.data.TensorDataset(torch.cat([batch(step) for step in range(3)]))
    losses = [lambda model, x: model(x).square().mean(), lambda model, x: model(x + 1).abs().mean()]
    model, plain = seeded(mlp), seeded(mlp)
    engine = sw.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), zero=zero)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for (x,) in sw.Loader(data, batch_size=8):
        for loss in losses:
            engine.backward(loss(model, x))
        stats = engine.step()
        whole = torch.cat(world.gather(x))
        optimizer.zero_grad()
        expected = sum(loss(plain, whole) for loss in losses)
        expected.backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), math.inf)
        optimizer.step()
        assert math.isclose(stats.loss, expected.item(), rel_tol=1e-8)
        assert math.isclose(stats.grad_norm, float(norm), rel_tol=1e-8)
    with engine.full_parameters():
        same_weights(model, plain)
    engine.close()


@pytest.mark.parametrize("zero", [0, 2])
def test_losses_of_one_batch_add_up(group, zero):
    group(2)(two_losses_of_one_batch, zero)


def state_dict_case(world, zero):
    torch.manual_seed(0)
    model = Tied()
    engine = sw.Engine(model, torch.optim.AdamW(model.parameters()), zero=zero, units=("embed",))
    engine.backward(model(world.share(batch(0))).square().mean())
    engine.step()
    state = engine.model_state_dict()
    if world.rank:
        assert state == {}
    with engine.full_parameters():
        expected = {name: value.clone() for name, value in model.state_dict().items()}
    if world.is_main:
        assert list(state) == list(expected)
        assert all(torch.equal(state[name], value) for name, value in expected.items())
        assert state["head.weight"] is state["embed.weight"]
        state["embed.weight"].zero_()  # copies
    with engine.full_parameters():
        assert torch.equal(model.embed.weight, expected["embed.weight"])


@pytest.mark.parametrize("zero", [0, 3])
def test_the_state_dict_is_whole_on_rank_0(group, zero):
    group(2)(state_dict_case, zero)


def left_folders_case(world, folder):
    model = nn.Linear(4, 2)
    engine = sw.Engine(model, torch.optim.SGD(model.parameters()), quiet=True)
    for number in range(2):
        engine.save(f"{folder}/{number}")
        engine.leave_folders()
    world.barrier()
    assert not list(Path(folder).glob("*/.lock"))


def test_leave_folders_releases_their_locks(group, tmp_path):
    group(2)(left_folders_case, str(tmp_path))
