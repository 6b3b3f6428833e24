"""bf16 parameters without fp32 masters (--optimizer-state 8bit-bf16)."""

import math

import pytest
import torch
from torch import nn, optim

import shardwise as sw
from shardwise.config import Settings, check_contradictions
from shardwise.errors import ConfigError, ModelError
from shardwise.layout.placement import Tier
from shardwise.states.storage import storage
from tests.distributed.test_quantised_state import SPAN, STEPS, Model, train

CHOICE = "8bit-bf16"


class Narrow(Model):
    def forward(self, x, step):
        return super().forward(x.bfloat16(), step)


def start(settings):
    storage.SPAN = SPAN  # several spans per bucket
    torch.manual_seed(5)
    model = Narrow().bfloat16()
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)
    settings = {"optimizer_state": CHOICE, "bucket_mb": 0.02, **settings}
    return model, sw.Engine(model, optimizer, **settings)


def weights(engine, model):
    with engine.full_parameters():
        return [p.detach().clone() for p in model.parameters()]


def case(world, settings, steps):
    model, engine = start(settings)
    train(engine, model, world, range(steps))
    nbytes = engine._states.bytes_by_state()["optimizer"], engine._states.expected_bytes()
    assert nbytes[1] == engine.state_bytes
    values = weights(engine, model)
    engine.close()
    return values, nbytes[0]


def test_bits_do_not_depend_on_workers_or_row(group):
    runs = [
        group(size, exact=4)(case, {"zero": zero, "overlap": False}, STEPS)[0][0]
        for size, zero in [(1, 0), (2, 1), (2, 3), (4, 2)]
    ]
    for values in runs[1:]:
        torch.testing.assert_close(values, runs[0], rtol=0, atol=0)


def test_state_has_no_masters(group):
    _, nbytes = group(1)(case, {}, 2)[0]
    blocks = sum(math.ceil(p.numel() / 256) for p in Model().parameters())
    assert nbytes == 2 * blocks * (256 + 4)


def small_updates(world, choice):
    """Return the mean change of weights of 1 after updates far below the distance to the next."""
    del world
    model = nn.Linear(64, 64, bias=False).bfloat16()
    nn.init.ones_(model.weight)
    # The distance from 1 to the next smaller value is 2**-8, about 40 updates.
    engine = sw.Engine(model, optim.Adam(model.parameters(), lr=1e-4), optimizer_state=choice)
    for _ in range(20):
        engine.backward(model(torch.ones(2, 64, dtype=torch.bfloat16)).float().mean())
        engine.step()
    change = 1 - model.weight.detach().double().mean()
    engine.close()
    return change.item()


def test_small_updates_are_not_lost(group):
    # 4,096 weights, each of which is 1 or 1 - 2**-8 with a probability of about a half.
    assert group(1)(small_updates, CHOICE) == [pytest.approx(20e-4, rel=0.05)]


def saves(world, folder, settings):
    model, engine = start(settings)
    train(engine, model, world, range(STEPS))
    path = engine.save(folder)
    at_save = weights(engine, model)
    train(engine, model, world, range(STEPS, 2 * STEPS))
    return path, at_save, weights(engine, model)


def loads(world, path, settings):
    model, engine = start(settings)
    engine.load(path)
    state = engine.optimizer_state_dict()["state"]
    loaded = weights(engine, model)
    train(engine, model, world, range(STEPS, 2 * STEPS))
    return loaded, weights(engine, model), state


def test_resumes_with_the_same_bits(group, tmp_path):
    path, at_save, expected = group(2)(saves, tmp_path, {"zero": 3})[0]
    assert "master" not in (path / "checkpoint.json").read_text()
    loaded, again, state = group(2)(loads, path, {"zero": 3})[0]
    torch.testing.assert_close(loaded, at_save, rtol=0, atol=0)
    torch.testing.assert_close(again, expected, rtol=0, atol=0)
    loaded, _, other = group(3)(loads, path, {"zero": 1})[0]
    torch.testing.assert_close(loaded, at_save, rtol=0, atol=0)
    torch.testing.assert_close(other, state, rtol=0, atol=0)


@pytest.mark.parametrize("full", ["full", "8bit"])
def test_checkpoints_load_with_and_without_masters(group, tmp_path, full):
    small, wide = {"zero": 2}, {"zero": 1, "optimizer_state": full}
    for first, second in [(small, wide), (wide, small)]:
        path, at_save, _ = group(2)(saves, tmp_path / first.get("optimizer_state", "s"), first)[0]
        loaded, _, _ = group(3)(loads, path, second)[0]
        torch.testing.assert_close(loaded, at_save, rtol=0, atol=0)


def refused(world):
    del world
    model = nn.Linear(3, 3)
    adam = optim.Adam(model.parameters())
    with pytest.raises(ModelError, match=r"no trained parameter is bf16\. Add --precision bf16"):
        sw.Engine(model, adam, optimizer_state=CHOICE)
    return True


def test_refuses_what_it_would_not_change(group):
    assert group(1)(refused) == [True]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("offload_optimizer", Tier("cpu")),
        ("offload_params", Tier("cpu")),
        ("ema_decay", 0.9),
        ("islands", 2),
    ],
)
def test_refuses_settings_that_need_masters(name, value):
    text = f"8bit-bf16 cannot be combined with --{name.replace('_', '-')} {value}: "
    with pytest.raises(ConfigError, match=text):
        check_contradictions(Settings(optimizer_state=CHOICE, **{name: value}))
