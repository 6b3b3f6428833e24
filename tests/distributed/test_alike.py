"""All ranks hold the same model, for any seeds and any changes by user code."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset, random_split

import shardwise as sw
from shardwise.errors import ConfigError, DataError, UsageError
from tests.distributed.test_engine import batch, close, mlp, same_weights


def digest(model):
    """Return numbers that differ for different parameters and buffers."""
    return [float(value.double().sum()) for value in model.state_dict().values()]


def unlike(world, dtype=torch.float32):
    """Return a model that each rank builds with another seed."""
    return mlp(dtype, seed=world.rank)


def masters_case(world, zero, precision):
    model = unlike(world)
    first = mlp(torch.float32, seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    engine = sw.Engine(model, optimizer, zero=zero, precision=precision, ema_decay=0.9)
    with engine.ema():
        same_weights(copy.deepcopy(model).float(), first, 1e-2)
    for step in range(3):
        engine.backward(model(world.share(batch(step).float())).square().mean())
        engine.step()
    same_weights(copy.deepcopy(model).float(), first, 3e-2)
    return digest(model)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_masters_and_averages_start_from_rank_0(group, zero, precision):
    first, *others = group(3)(masters_case, zero, precision)
    assert all(other == first for other in others)


def new_head_case(world, zero, precision):
    model = nn.ModuleDict({"body": nn.Linear(6, 6)})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = sw.Engine(model, optimizer, zero=zero, precision=precision)
    x = batch(0).float()

    def train(forward):
        engine.backward(forward(world.share(x).to(model["body"].weight.dtype)).square().mean())
        engine.step()

    train(model["body"])
    model["head"] = nn.Linear(6, 2)  # built after the engine, so each rank draws other weights
    optimizer.add_param_group({"params": list(model["head"].parameters())})
    for _ in range(3):
        train(lambda x: model["head"](model["body"](x)))
    return digest(model)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("zero", [0, 2])
def test_a_head_added_later_gets_rank_0s_values(group, zero, precision):
    first, second = group(2)(new_head_case, zero, precision)
    assert first == second


def untrained_case(world):
    model = nn.ModuleDict({"net": unlike(world), "target": unlike(world)})
    engine = sw.Engine(model, torch.optim.SGD(model["net"].parameters(), lr=0.1))
    assert engine.placement.level == 0
    same_weights(model["target"], mlp(torch.float32, seed=0))


def test_parameters_without_an_optimizer_get_rank_0s_values(group):
    for error in group(2).errors(untrained_case):
        # Only rank 0 warns that they are not trained, and warnings are errors in tests.
        assert error is None or error[0] == "UserWarning"


def write_case(world):
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
    model[0].bias.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    engine = sw.Engine(model, optimizer, zero=1, precision="bf16")
    with engine.full_parameters(write=True):
        for value in model.state_dict().values():
            value.fill_(7 if world.rank == 0 else 3)
    assert all(bool((value == 7).all()) for value in model.state_dict().values())
    # Loading the same on all ranks needs no context, and updates the masters.
    model.load_state_dict({k: torch.full_like(v, 5) for k, v in model.state_dict().items()})
    engine.backward(model(batch(0).bfloat16()).square().mean())
    engine.step()
    assert bool((model[0].weight == 5).all())


def test_writes_of_user_code_are_kept(group):
    group(2)(write_case)


def accumulation_case(world, zero):
    """Accumulate 300 gradients of 1, whose bf16 sum would stop at 256."""
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    engine = sw.Engine(model, optimizer, zero=zero, precision="bf16")
    for backwards in (2, 300):  # the first step shows that steps have several backwards
        for i in range(backwards):
            engine.backward(model(torch.ones(1, 1)).mean(), last=i == backwards - 1)
        stats = engine.step()
    assert stats.grad_norm == pytest.approx(1.0, rel=2e-3)


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_many_micro_batches_in_16_bit(group, zero):
    group(2)(accumulation_case, zero)


class Lamb(torch.optim.Optimizer):
    """Scales each tensor's update by the norms of the full tensor (You et al., 2020)."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                ratio = p.norm() / p.grad.norm().clamp(min=1e-12)
                p.sub_(p.grad * ratio, alpha=float(group["lr"]))


def warm_up_case(world):
    def make(model):
        optimizer = Lamb(model.parameters(), lr=0.1)
        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: s / 5)

    model, plain = mlp(), mlp()
    optimizer, scheduler = make(model)
    assert optimizer.param_groups[0]["lr"] == 0
    engine = sw.Engine(model, optimizer, zero=2, bucket_mb=0.0005)
    reference, theirs = make(plain)
    for step in range(5):
        engine.backward(model(world.share(batch(step))).square().mean())
        engine.step()
        scheduler.step()
        reference.zero_grad()
        plain(batch(step)).square().mean().backward()
        reference.step()
        theirs.step()
    same_weights(model, plain)


def test_an_optimizer_is_known_even_at_a_rate_of_zero(group):
    group(2)(warm_up_case)


def factored_case(world):
    model = mlp()
    optimizer = torch.optim.Adafactor(model.parameters())
    engine = sw.Engine(model, optimizer, zero=1)
    for step in range(4):
        if step == 2:
            model[0].requires_grad_(False)
        engine.backward(model(world.share(batch(step))).square().mean())
        engine.step()
    return digest(model)


def test_factored_state_survives_a_rebuild(group):
    first, second = group(2)(factored_case)
    assert first == second


def norm_net():
    torch.manual_seed(0)
    split = [nn.Linear(6, 12), nn.Unflatten(1, (4, 3))]
    return nn.Sequential(*split, nn.BatchNorm1d(4), nn.Flatten(), nn.Linear(12, 1)).double()


def statistics_case(world, evaluate, sync):
    model = norm_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    engine = sw.Engine(model, optimizer, sync_batch_norm=sync)
    data = TensorDataset(batch(1, 10))
    if evaluate:
        model.eval()
        with torch.no_grad():
            for (x,) in sw.Loader(TensorDataset(batch(2, 5)), batch_size=4):
                model(x)
        model.train()
    loader = sw.Loader(data, batch_size=5, micro_batch_size=2)
    for _ in range(2):
        for step in loader.steps():
            for (x,) in step:
                engine.backward(model(x).square().mean())
            engine.step()
    return model[2].running_mean.tolist()


@pytest.mark.parametrize("sync", [False, True])
def test_an_evaluation_changes_no_statistics(group, sync):
    assert group(2)(statistics_case, True, sync) == group(2)(statistics_case, False, sync)


def close_case(world):
    model = norm_net().float()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = sw.Engine(model, optimizer, precision="bf16-mixed", sync_batch_norm=True)
    engine.close()
    assert type(model[2]) is nn.BatchNorm1d
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    model(batch(0).float()).sum().backward()
    optimizer.step()
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})


def test_close_returns_plain_objects(group):
    group(2)(close_case)


class Cache(nn.Module):
    """A table that grows with its input, as rotary caches do; ranks have other lengths."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.zeros(1, dtype=torch.float64), persistent=False)
        self.register_buffer("phase", torch.ones(1, dtype=torch.complex64))
        self.register_buffer("kinds", torch.ones(3, dtype=torch.int16))
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))
        self.linear = nn.Linear(6, 1).double()

    def forward(self, x, length):
        self.calls += 1
        if length > len(self.table):
            self.table = torch.arange(length, dtype=torch.float64)
        return self.linear(x)


def cache_case(world):
    model = Cache()
    model.phase.fill_(1 + 2j)
    engine = sw.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), zero=1)
    for step in range(4):
        engine.backward(model(world.share(batch(step)), 2 + 3 * world.rank + step).mean())
        engine.step()
        assert torch.equal(model.table, torch.arange(2 + 3 * world.rank + step).double())
    assert complex(model.phase) == 1 + 2j
    assert float(model.calls) == 4


def test_buffers_that_differ_by_rank_are_left_alone(group):
    group(2)(cache_case)


def misuse_case(world):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"micro_batch_size is not a setting.*sw\.Loader"):
        sw.Engine(model, optimizer, micro_batch_size=2)
    engine = sw.Engine(model, optimizer, ema_decay=0.5)
    loss = model(batch(0)).square().mean()
    with engine.ema(), pytest.raises(UsageError, match=r"inside engine\.ema"):
        engine.backward(loss)
    engine.backward(model(batch(0)).square().mean(), last=False)
    optimizer.zero_grad()
    with pytest.raises(UsageError, match="cleared"):
        engine.backward(model(batch(0)).square().mean())


def test_refuses_misuse_by_name(group):
    group(1)(misuse_case)


def hidden_case(world):
    def inside(x, net):
        return torch.utils.checkpoint.checkpoint(net, x, use_reentrant=True)

    one, two = mlp(), mlp()
    first = sw.Engine(one, torch.optim.SGD(one.parameters(), lr=0.1))
    second = sw.Engine(two, torch.optim.SGD(two.parameters(), lr=0.1))
    x = batch(0).requires_grad_()
    with pytest.raises(UsageError, match="use_reentrant=False"):
        first.backward(inside(x, one).square().mean())
    assert second.steps == 0


def test_reentrant_checkpointing_beside_another_engine(group):
    group(1)(hidden_case)


def big_objects_case(world):
    sizes = [len(data) for data in world.gather(b"x" * (20_000_003 + world.rank))]
    assert sizes == [20_000_003, 20_000_004]


def test_objects_longer_than_fp32_counts(group):
    group(2)(big_objects_case)


def different_data_case(world):
    model = mlp()
    engine = sw.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model(batch(0, 2))  # from here on each rank draws its own numbers
    assert engine.steps == 0
    part, _ = random_split(TensorDataset(batch(0, 12)), [8, 4])  # ranks draw their own numbers now
    next(iter(sw.Loader(part, batch_size=4)))


def drawn_data_case(world):
    model = mlp()
    engine = sw.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model(batch(0, 2))  # from here on each rank draws its own numbers
    assert engine.steps == 0
    drawn = TensorDataset(batch(0, 12), torch.randn(12))
    next(iter(sw.Loader(drawn, batch_size=4)))


@pytest.mark.parametrize("case", [different_data_case, drawn_data_case])
def test_names_different_datasets(group, case):
    for error in group(2).errors(case):
        assert error is not None
        assert error[0] == DataError.__name__
        assert "with other contents" in error[1]
        assert "inside world.alike()" in error[1]


def unequal_backwards_case(world):
    model = mlp()
    engine = sw.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), zero=0)
    for i in range(1 + world.rank):
        engine.backward(model(batch(i)).square().mean(), weight=8, last=i == world.rank)
    engine.step()
    return digest(model)


def test_replicated_gradients_allow_unequal_numbers_of_backwards(group):
    first, second = group(2)(unequal_backwards_case)
    assert close(torch.tensor(first), torch.tensor(second), 1e-12)


def resume_case(world, folder, rows):
    """Save with plain PyTorch at one row, and continue at another."""

    def fresh():
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return model, optimizer, sw.Loader(TensorDataset(batch(7, 24)), batch_size=4, shuffle=True)

    def train(model, optimizer, loader, zero, epochs):
        engine = sw.Engine(model, optimizer, zero=zero)
        for _ in loader.epochs(epochs):
            for (x,) in loader:
                engine.backward(model(x).square().mean())
                engine.step()
        return engine

    whole = fresh()
    train(*whole, 0, 2)
    model, optimizer, loader = fresh()
    engine = train(model, optimizer, loader, rows[0], 1)
    state = engine.optimizer_state_dict()
    if world.is_main:
        saved = {"model": model.state_dict(), "optimizer": state, "loader": loader.state_dict()}
        torch.save(saved, f"{folder}/saved.pt")
    world.barrier()
    saved = torch.load(f"{folder}/saved.pt", weights_only=True)
    model, optimizer, loader = fresh()
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    loader.load_state_dict(saved["loader"])
    train(model, optimizer, loader, rows[1], 2)
    same_weights(model, whole[0])


@pytest.mark.parametrize("rows", [(2, 1), (0, 2), (1, 0)])
def test_a_plain_save_continues_at_another_row(group, tmp_path, rows):
    group(2)(resume_case, str(tmp_path), rows)


def narrow_loss_case(world, dtype):
    x = torch.arange(1.0, 4.0)[None] + world.rank
    weights = [(257, 300), (257, 300), (3, 70001), (0, 513), (1, 1)]
    model = nn.Linear(3, 1)
    engine = sw.Engine(model, torch.optim.SGD(model.parameters(), lr=0.0), quiet=True)
    for first, second in weights:
        weight = second if world.rank else first
        for part in (weight // 2, weight - weight // 2):
            engine.backward(model(x).mean().to(dtype), weight=part, last=False)
        mean = (first * torch.arange(1.0, 4.0) + second * torch.arange(2.0, 5.0)) / (first + second)
        plain = float(torch.cat([mean, torch.ones(1)]).norm())
        assert engine.step().grad_norm == pytest.approx(plain, rel=1e-6)
    engine.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_weight_of_a_16_bit_loss_is_not_rounded(group, dtype):
    group(2)(narrow_loss_case, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_16_bit_model_alone_has_the_gradient_of_its_loss(solo, dtype):
    model = nn.Linear(4, 1).to(dtype)
    engine = sw.Engine(model, torch.optim.SGD(model.parameters(), lr=0.0), quiet=True)
    for _ in range(2):
        engine.backward(model(torch.ones(2, 4, dtype=dtype)).mean(), weight=70001)
        assert engine.step().grad_norm == pytest.approx(5**0.5, rel=1e-9)
    engine.close()
