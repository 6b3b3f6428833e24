"""Steps with a closure, compared with a plain process."""

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.errors import UsageError
from tests.distributed.group import RankFailed

STEPS = 4


def made():
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)).double()
    x = torch.randn(12, 5, dtype=torch.float64)
    return model, x, x.prod(1, keepdim=True)


def lbfgs(model):
    return torch.optim.LBFGS(
        model.parameters(), lr=0.5, max_iter=6, history_size=4, line_search_fn="strong_wolfe"
    )


def momentum(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


OPTIMIZERS = {"lbfgs": lbfgs, "momentum": momentum}


def plainly(name):
    model, x, y = made()
    optimizer, losses = OPTIMIZERS[name](model), []

    def closure():
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        return loss

    losses += [optimizer.step(closure).item() for _ in range(STEPS)]
    return losses, [p.detach() for p in model.parameters()]


def closure_case(world, name, settings, saved):
    model, x, y = made()
    optimizer = OPTIMIZERS[name](model)
    engine, losses = sw.Engine(model, optimizer, bucket_mb=0.0002, **settings), []
    mine, wanted = world.share((x, y))

    def closure():
        optimizer.zero_grad()
        loss = (model(mine) - wanted).square().mean()
        engine.backward(loss)
        return loss

    losses += [engine.step(closure=closure).loss for _ in range(STEPS)]
    with engine.full_parameters():
        values = [p.detach().clone() for p in model.parameters()]
    state = engine.optimizer_state_dict() if saved else None
    engine.close()
    return losses, values, state


def is_close(ours, theirs):
    torch.testing.assert_close(torch.tensor(ours[0]), torch.tensor(theirs[0]), rtol=1e-8, atol=0)
    for value, wanted in zip(ours[1], theirs[1], strict=True):
        torch.testing.assert_close(value, wanted, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_lbfgs_as_in_one_process(group, size):
    """Its line search evaluates as often as it needs, on any number of workers."""
    for ours in group(size)(closure_case, "lbfgs", {}, True):
        is_close(ours, plainly("lbfgs"))
        assert ours[2]["state"][0]["n_iter"] > STEPS


@pytest.mark.parametrize("zero", range(4))
def test_closure_of_other_optimizers_is_called_once(group, zero):
    is_close(group(2)(closure_case, "momentum", {"zero": zero}, False)[0], plainly("momentum"))


def test_refuses_settings_that_lbfgs_does_not_support(group):
    with pytest.raises(RankFailed, match="LBFGS combines values of several tensors in its update"):
        group(2)(closure_case, "lbfgs", {"zero": 2}, False)
    with pytest.raises(
        RankFailed, match="16-bit parameters are copied from their fp32 masters only"
    ):
        group(1)(closure_case, "lbfgs", {"precision": "bf16"}, False)


def not_finite_case(world, settings):
    model = made()[0].float()
    scaler = torch.amp.GradScaler("cpu") if settings.pop("scaled", False) else None
    optimizer = lbfgs(model)
    engine = sw.Engine(model, optimizer, scaler=scaler, **settings)
    before = [p.detach().clone() for p in model.parameters()]

    def closure():
        loss = model(torch.ones(2, 5)).mean() * torch.nan
        engine.backward(loss)
        return loss

    try:
        engine.step(closure=closure)
    finally:
        assert all(map(torch.equal, before, model.parameters()))
        engine.close()


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"nonfinite": "skip"}, "with --nonfinite skip: LBFGS moves parameters between"),
        ({"precision": "fp16-mixed"}, "with a loss scale: LBFGS moves parameters between"),
        ({"scaled": True}, "with a loss scale: LBFGS moves parameters between"),
        ({}, "the gradient is not finite in 0.bias, 0.weight"),
    ],
)
def test_nonfinite_loss_moves_no_parameter(group, settings, told):
    with pytest.raises(RankFailed, match=told):
        group(1)(not_finite_case, settings)


def habits_case(world):
    model, x, y = made()
    engine = sw.Engine(model, lbfgs(model))
    engine.backward((model(x) - y).square().mean())
    with pytest.raises(UsageError, match=r"LBFGS evaluates .* engine.step\(closure=closure\)"):
        engine.step()
    with pytest.raises(UsageError, match=r"the closure calls engine\.backward"):
        engine.step(closure=lambda: None)
    engine.zero_grad()
    with pytest.raises(UsageError, match="call backward first"):
        engine.step(closure=lambda: None)
    engine.close()


def test_error_names_the_line_to_write(group):
    group(1)(habits_case)
