"""Gradients between backward and step: read and written as in a plain process, in every row."""

import copy

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.errors import UsageError
from tests.disk import on_a_disk
from tests.distributed.group import RankFailed
from tests.tables import each_value

SIZES = (1, 2, 3)
ROWS = [{"zero": zero} for zero in range(4)]
STEPS = 3


def made():
    """Return a model with units and a part that no batch uses, and data."""
    torch.manual_seed(3)
    blocks = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)]
    model = nn.Sequential(*blocks, nn.Linear(6, 1)).double()
    model.add_module("unused", nn.Linear(1, 1).double())
    model.forward = lambda x: model[3](model[2](model[1](model[0](x))))
    x = torch.randn(12, 6, dtype=torch.float64)
    return model, x, x.sum(1, keepdim=True).sin()


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=0.02)


def loss_of(model, x, y):
    return (model(x) - y).square().mean()


def per_layer(model):
    """Clip by value and then by each layer's norm; remove one gradient, and set another one."""
    nn.utils.clip_grad_value_(model.parameters(), 0.05)
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.weight.grad is not None:
            norm = module.weight.grad.norm()
            module.weight.grad.div_(max(1.0, float(norm) / 0.1))
    model[1][0].bias.grad = None
    model.unused.bias.grad = torch.full_like(model.unused.bias, 0.5)


def plainly(change, *, max_norm=None, made_by=adam, kicks=0.0):
    model, x, y = made()
    optimizer, told = made_by(model), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward()
        change(model)
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm or torch.inf)
        optimizer.step()
        told.append((loss.item(), norm.item()))
    return told, [p.detach().clone() for p in model.parameters()]


def whole(engine, model):
    with engine.full_parameters():
        return [p.detach().clone() for p in model.parameters()]


def changed_case(world, settings, max_norm, parts):
    model, x, y = made()
    engine, told = sw.Engine(model, adam(model), bucket_mb=0.0004, **settings), []
    for _ in range(STEPS):
        for rows_x, rows_y in zip(x.chunk(parts), y.chunk(parts), strict=True):
            mine, wanted = world.share((rows_x, rows_y))
            engine.backward(loss_of(model, mine, wanted))
        with engine.full_gradients():
            per_layer(model)
        stats = engine.step(max_norm=max_norm)
        told.append((stats.loss, stats.grad_norm))
    values = whole(engine, model)
    engine.close()
    return told, values


def is_close(ours, theirs):
    (told, values), (expected, wanted) = ours, theirs
    torch.testing.assert_close(torch.tensor(told), torch.tensor(expected), rtol=1e-9, atol=1e-12)
    for value, each in zip(values, wanted, strict=True):
        torch.testing.assert_close(value, each, rtol=1e-9, atol=1e-12)


@each_value(settings=ROWS, size=SIZES)
def test_written_gradients_are_applied(group, size, settings):
    """The step is clipped by the norm of the written gradients, in one or three micro-batches."""
    expected = plainly(per_layer, max_norm=0.2)
    for parts in (1, 3):
        for ours in group(size)(changed_case, settings, 0.2, parts):
            is_close(ours, expected)


def test_on_other_tiers(group):
    where = f"nvme:{on_a_disk()}"
    expected = plainly(per_layer)
    for settings in (
        {"zero": 3, "offload_params": "cpu", "offload_optimizer": "cpu"},
        {"zero": 2, "offload_optimizer": where},
        {"zero": 3, "shard_within": "host"},
    ):
        is_close(group(2)(changed_case, settings, None, 1)[0], expected)


def exact_case(world, zero):
    model, x, y = made()
    engine = sw.Engine(model, adam(model), zero=zero)
    loader = sw.Loader(torch.utils.data.TensorDataset(x, y), batch_size=12)
    norms = []
    for _ in range(STEPS):
        for step in loader.steps():
            for mine, wanted in step:
                engine.backward(loss_of(model, mine, wanted))
            with engine.full_gradients():
                per_layer(model)
            norms.append(engine.step().grad_norm)
    values = whole(engine, model)
    engine.close()
    return norms, values


def test_the_same_bits_in_the_exact_mode(group):
    first_norms, first = group(1, exact=4)(exact_case, 0)[0]
    for zero in (0, 3):
        norms, values = group(2, exact=4)(exact_case, zero)[0]
        assert norms == first_norms
        assert all(map(torch.equal, values, first))
    expected = plainly(per_layer)
    torch.testing.assert_close(first, expected[1], rtol=1e-9, atol=1e-12)


def reading_case(world, zero):
    """Reading changes no bit, and the norm is the step's."""
    found = []
    for reads in (False, True):
        model, x, y = made()
        engine = sw.Engine(model.float(), adam(model), zero=zero)
        for _ in range(STEPS):
            engine.backward(loss_of(model, *world.share((x.float(), y.float()))))
            norm = engine.reduce() if reads else None
            if reads:
                with engine.full_gradients():
                    grads = [p.grad for p in model.parameters() if p.grad is not None]
                    by_hand = torch.stack([g.double().norm() for g in grads]).norm().item()
            stats = engine.step(max_norm=0.1)
            assert norm in (None, stats.grad_norm)
        if reads:
            assert by_hand == pytest.approx(stats.grad_norm, rel=1e-5)
        found.append(whole(engine, model))
        engine.close()
    return all(map(torch.equal, *found))


@pytest.mark.parametrize("zero", range(4))
def test_reading_changes_nothing(group, zero):
    assert group(2)(reading_case, zero) == [True, True]


def ranks_case(world):
    """Write different values on each rank. Rank 0's values apply on all ranks."""
    model, x, y = made()
    engine = sw.Engine(model, adam(model), zero=0)
    engine.backward(loss_of(model, *world.share((x, y))))
    with engine.full_gradients():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.fill_(float(world.rank + 1))
    engine.step()
    values = whole(engine, model)
    engine.close()
    return values


def test_ranks_stay_equal_if_they_write_differently(group):
    first, second = group(2)(ranks_case)
    assert all(map(torch.equal, first, second))


def traceless_case(world, zero, way):
    """Gradients are +1, -1, +1, -1 (or half of it), so that a change flips the sign."""
    weight = nn.Linear(4, 1, bias=False)
    model = nn.Sequential(weight)
    start = weight.weight.detach().clone()
    engine = sw.Engine(model, torch.optim.SGD(model.parameters(), lr=1.0), zero=zero)
    x = torch.tensor([[1.0, -1.0, 1.0, -1.0]])
    engine.backward(model(x).sum())
    with engine.full_gradients():
        if way == "exchanged":
            weight.weight.grad.data = weight.weight.grad.flip(1)
        elif way == "numpy":
            weight.weight.grad.numpy()[...] *= -1.0
        else:
            weight.weight.grad.data.neg_()
    engine.step()
    (value,) = whole(engine, model)
    engine.close()
    torch.testing.assert_close(value, start + x)


@pytest.mark.parametrize("way", ["data", "numpy", "exchanged"])
def test_applies_writes_that_count_no_version(group, way):
    """The sum of the bits stays the same here, too."""
    group(2)(traceless_case, 2, way)


def untouched_case(world, zero):
    """The momentum is the sum of the gradients, here wider than the shown 16-bit ones."""
    found = []
    for touches in (False, True):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=1.0)
        engine = sw.Engine(model, optimizer, precision="bf16", zero=zero)
        x = torch.randn(12, 4).bfloat16()
        for _ in range(2):
            for rows in x.split([5, 7]):
                engine.backward(model(rows).square().mean(), weight=len(rows))
            with engine.full_gradients():
                if touches:
                    model[2].bias.grad.mul_(1.0)
            engine.step()
        state = engine.optimizer_state_dict()["state"]
        found.append([state[number]["momentum_buffer"].clone() for number in range(3)])
        engine.close()
    return all(map(torch.equal, *found))


@pytest.mark.parametrize("zero", [0, 2])
def test_untouched_gradients_keep_their_bits(group, zero):
    assert group(2)(untouched_case, zero) == [True, True]


def sparse_case(world):
    model, x, y = made()
    engine = sw.Engine(model, adam(model))
    engine.backward(loss_of(model, x, y))
    with (
        pytest.raises(UsageError, match=r"the gradient of 0.0.weight was set to a sparse tensor"),
        engine.full_gradients(),
    ):
        model[0][0].weight.grad = model[0][0].weight.grad.to_sparse()
    assert model[0][0].weight.grad is None
    engine.backward(loss_of(model, x, y))
    assert not engine.step().skipped
    engine.close()


def test_sparse_gradient_leaves_the_step_unchanged(group):
    group(1)(sparse_case)


def sharpness(model, x, y, radius, backward, gradients, writes, forget):
    """Sharpness-aware minimisation: apply the gradient of the worst point nearby."""
    backward(loss_of(model, x, y))
    with gradients():
        found = [(p, p.grad.clone()) for p in model.parameters() if p.grad is not None]
    norm = torch.stack([grad.norm() for _, grad in found]).norm()
    away = [(p, radius * grad / norm) for p, grad in found]
    forget()
    with writes(), torch.no_grad():
        for parameter, move in away:
            parameter.add_(move)
    loss = loss_of(model, x, y)
    backward(loss)
    with writes(), torch.no_grad():
        for parameter, move in away:
            parameter.sub_(move)


def sharp_case(world, zero):
    model, x, y = made()
    engine, losses = sw.Engine(model, adam(model), zero=zero), []
    mine, wanted = world.share((x, y))
    for _ in range(STEPS):
        sharpness(
            model,
            mine,
            wanted,
            0.05,
            engine.backward,
            engine.full_gradients,
            lambda: engine.full_parameters(write=True),
            engine.zero_grad,
        )
        losses.append(engine.step().loss)
    values = whole(engine, model)
    engine.close()
    return losses, values


@pytest.mark.parametrize("zero", range(4))
def test_sharpness_aware_steps(group, zero):
    from contextlib import nullcontext

    model, x, y = made()
    optimizer = adam(model)
    for _ in range(STEPS):
        optimizer.zero_grad()
        sharpness(
            model, x, y, 0.05, torch.Tensor.backward, nullcontext, nullcontext, optimizer.zero_grad
        )
        optimizer.step()
    _, values = group(3)(sharp_case, zero)[0]
    for value, wanted in zip(values, model.parameters(), strict=True):
        torch.testing.assert_close(value, wanted.detach(), rtol=1e-9, atol=1e-12)


def late_case(world):
    model, x, y = made()
    engine = sw.Engine(model, adam(model))
    with pytest.raises(UsageError, match=r"full_gradients\(\) was called without engine.backward"):
        engine.full_gradients().__enter__()
    engine.backward(loss_of(model, x, y))
    with engine.full_gradients():
        pass
    with pytest.raises(UsageError, match=r"backward after engine.full_gradients\(\)"):
        engine.backward(loss_of(model, x, y))
    engine.zero_grad()
    engine.backward(loss_of(model, x, y))
    assert not engine.step().skipped
    engine.close()


def test_refuses_late_use(group):
    group(1)(late_case)


def split_case(world):
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    plan = {"0": "colwise", "2": "rowwise"}
    engine = sw.Engine(model, adam(model), tensor_plan=plan)
    engine.backward(model(torch.ones(2, 4)).mean())
    try:
        norm = engine.reduce()
        with engine.full_gradients():
            pass
    finally:
        engine.zero_grad()
        engine.close()
    return norm


def test_refuses_split_models_by_name(group):
    with pytest.raises(RankFailed, match=r"full_gradients\(\) with --tensor 2: no worker has"):
        group(2, tensor=2)(split_case)


def test_copy_of_a_shown_gradient_is_plain(group):
    """The copy keeps no attribute of the engine."""
    for grad in group(2)(copied_case):
        assert type(grad) is torch.Tensor


def copied_case(world):
    model, x, y = made()
    engine = sw.Engine(model, adam(model), zero=3)
    engine.backward(loss_of(model, *world.share((x, y))))
    with engine.full_gradients():
        grad = copy.deepcopy(model[0][0].weight.grad)
    engine.step()
    engine.close()
    return grad
