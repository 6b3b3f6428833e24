"""A resume restores an optimizer's attributes, and state that belongs to no parameter."""

import copy
import io
import itertools
import json
from collections import deque
from pathlib import Path

import pytest
import torch
from torch import nn, optim

import shardwise as sw
from shardwise.checkpoint.tools import OpenedCheckpoint
from shardwise.errors import BrokenCheckpoint
from tests.distributed.test_users_optimizer import (
    ByPosition,
    Lookahead,
    SharedCount,
    WarmUp,
)
from tests.tables import covering

HALF = 3


class Wide(optim.Optimizer):
    """Keeps one value of each kind; some refer to others."""

    def __init__(self, params, lr=0.2, every=2):
        super().__init__(params, {"lr": lr})
        self.every = every
        self.by_id, self.last, self.pair = {}, deque(maxlen=3), (0, 1.0)
        self.generator = torch.Generator().manual_seed(3)
        self.nested = {"counts": [0, 0], "history": self.last, "beta": torch.tensor(0.5)}
        self.average = None

    @torch.no_grad()
    def step(self, closure=None):
        counts = self.nested["counts"]
        counts[len(self.last) % 2] += 1
        self.pair = (self.pair[0] + 1, self.pair[1] * 0.9)
        noise = torch.rand((), generator=self.generator, dtype=torch.float64)
        self.last.append(noise.item() / 50)
        self.nested["beta"].mul_(0.9)
        parameters = [p for group in self.param_groups for p in group["params"]]
        if self.average is None:
            self.average = [torch.zeros_like(p) for p in parameters]
        rate = self.pair[1] + sum(self.nested["history"]) - counts[0] / 40
        for p, average in zip(parameters, self.average, strict=True):
            first = self.by_id.setdefault(id(p), p.clone())
            average.lerp_(p.grad, 1 - self.nested["beta"].item())
            p.sub_(average, alpha=self.param_groups[0]["lr"] * rate)
            if self.pair[0] % self.every == 0:
                p.lerp_(first, 0.1)


class Sparing(Lookahead):
    """Shares the state of the optimizer that it wraps, as some published wrappers do."""

    def __init__(self, base):
        super().__init__(base)
        self.fast_state = base.state


MAKE = {
    "attributes": WarmUp,
    "wrapper": lambda params: Lookahead(optim.AdamW(params, lr=0.05)),
    "wrapper with shared state": lambda params: Sparing(optim.AdamW(params, lr=0.05)),
    "by position": ByPosition,
    "common state": SharedCount,
    "all kinds": Wide,
}


def made(make):
    torch.manual_seed(0)
    x = torch.randn(8, 6, dtype=torch.float64)
    # Larger than the largest tensor in JSON.
    model = nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 6)).double()
    return x, model, make(model.parameters())


def trained(world, engine, model, x, steps):
    mine, losses = world.share(x), []
    for _ in range(steps):
        engine.backward((model(mine) - mine).square().mean())
        losses.append(engine.step().loss)
    return losses


def saved_case(world, name, zero, folder):
    x, model, optimizer = made(MAKE[name])
    engine = sw.Engine(model, optimizer, zero=zero, bucket_mb=0.0001)
    trained(world, engine, model, x, HALF)
    path = engine.save(folder)
    losses = trained(world, engine, model, x, HALF)
    # A load in the middle restores the attributes of that moment.
    engine.load(path)
    assert trained(world, engine, model, x, HALF) == pytest.approx(losses, rel=1e-12)
    engine.close()
    return losses


def resumed_case(world, name, zero, folder):
    x, model, optimizer = made(MAKE[name])
    engine = sw.Engine(model, optimizer, zero=zero, bucket_mb=0.0001)
    assert engine.resume(folder) == HALF
    losses = trained(world, engine, model, x, HALF)
    engine.close()
    return losses


@pytest.mark.parametrize(
    ("name", "zero", "sizes"),
    covering(
        (name, zero, sizes)
        for name, zero in (
            *((name, 0) for name in MAKE),
            *(("attributes", 2), ("common state", 1), ("attributes", 3)),
        )
        for sizes in ((1, 2), (2, 2))
    ),
)
def test_resume_equals_the_uninterrupted_run(group, name, zero, sizes, tmp_path):
    losses = group(sizes[0])(saved_case, name, zero, tmp_path)[0]
    for resumed in group(sizes[1])(resumed_case, name, zero, tmp_path):
        assert resumed == pytest.approx(losses, rel=1e-12)


def state_dict_case(world, name):
    """The same through torch.save of a state_dict, as in other libraries' checkpoints."""
    x, model, optimizer = made(MAKE[name])
    engine = sw.Engine(model, optimizer, zero=0)
    trained(world, engine, model, x, HALF)
    buffer = io.BytesIO()
    torch.save((model.state_dict(), engine.optimizer_state_dict()), buffer)
    losses = trained(world, engine, model, x, HALF)
    engine.close()

    buffer.seek(0)
    weights, state = torch.load(buffer, weights_only=True)
    _, model, optimizer = made(MAKE[name])
    model.load_state_dict(weights)
    engine = sw.Engine(model, optimizer, zero=0)
    engine.load_optimizer_state_dict(state)
    assert trained(world, engine, model, x, HALF) == pytest.approx(losses, rel=1e-12)
    engine.close()


@pytest.mark.parametrize("name", MAKE)
def test_state_dict_has_the_attributes(group, name):
    group(2)(state_dict_case, name)


def torchs_case(world, folder):
    x, model, optimizer = made(lambda params: optim.AdamW(params, lr=0.05))
    engine = sw.Engine(model, optimizer)
    trained(world, engine, model, x, 1)
    described = json.loads((engine.save(folder) / "checkpoint.json").read_text())
    assert "attributes" not in described["optimizers"][0]
    assert set(described["sets"]) == {"model", "optimizer"}
    assert set(engine.optimizer_state_dict()) == {"state", "param_groups"}
    engine.close()


def test_optimizer_of_torch_has_no_attributes_to_save(group, tmp_path):
    group(1)(torchs_case, tmp_path)


def background_case(world, folder):
    x, model, optimizer = made(MAKE["by position"])
    engine = sw.Engine(model, optimizer, zero=0)
    trained(world, engine, model, x, HALF)
    path = engine.save(folder, background=True)
    kept = copy.deepcopy(optimizer.buffers)
    trained(world, engine, model, x, HALF)
    engine.load(path)
    assert all(map(torch.equal, optimizer.buffers, kept))
    engine.close()
    return str(path)


def test_background_save_has_the_tensors_of_its_step(group, tmp_path):
    path = Path(group(2)(background_case, tmp_path)[0])
    fields = json.loads((path / "checkpoint.json").read_text())["optimizers"][0]["attributes"]
    assert list(fields) == ["buffers"]
    with OpenedCheckpoint(path) as opened:
        assert sorted(opened.sets["attributes"].specs) == ["0.buffers.0", "0.buffers.2"]
        assert all(good for _, good in opened.verify_tensors())


def beginning_case(world, folder):
    """Load a checkpoint from before the first step, which has no attributes."""
    x, model, optimizer = made(MAKE["wrapper"])
    engine = sw.Engine(model, optimizer, zero=0)
    path = engine.save(folder)
    losses = trained(world, engine, model, x, HALF)
    engine.load(path)
    assert (optimizer.count, optimizer.slow, len(optimizer.base.state)) == (0, {}, 0)
    assert trained(world, engine, model, x, HALF) == losses
    engine.close()


def test_load_resets_attributes_that_had_not_changed(group, tmp_path):
    group(1)(beginning_case, tmp_path)


def chosen_case(world, folder):
    for every in (2, 5):
        x, model, optimizer = made(lambda params, every=every: Wide(params, every=every))
        engine = sw.Engine(model, optimizer, zero=0)
        engine.resume(folder)
        trained(world, engine, model, x, HALF)
        engine.save(folder)
        engine.close()
    assert optimizer.pair[0] == 2 * HALF
    assert optimizer.every == 5


def test_resume_keeps_attributes_that_the_script_sets(group, tmp_path):
    group(1)(chosen_case, tmp_path)


class Ticking(WarmUp):
    def __init__(self, params):
        super().__init__(params)
        self.ticks = itertools.count()
        self.rate_of = lambda step: 1 / step
        self.made_later = None

    def step(self, closure=None):
        next(self.ticks)
        self.made_later = self.schedule
        super().step()


class Renamed:
    steps = 0


def island_case(world, folder):
    """Save with islands whose optimizers averaged different gradients."""
    said = []
    world.say_once = said.append
    try:
        x, model, optimizer = made(Wide)
        engine = sw.Engine(model, optimizer, zero=0, equal_every=4)
        for step in range(HALF):
            rows = x[step:] * (1 + world.rank)
            engine.backward(model(rows).square().mean())
            engine.step()
        engine.save(folder)
        engine.close()
    finally:
        del world.say_once
    return said


def test_unequal_attributes_of_islands_are_reported(group, tmp_path):
    said, _ = group(2, islands=2)(island_case, tmp_path)
    (line,) = [each for each in said if "islands have different values" in each]
    assert "average" in line
    assert "of Wide. A checkpoint contains those of island 0" in line


def named_case(world, folder):
    said = []
    world.say_once = said.append
    try:
        x, model, optimizer = made(Ticking)
        engine = sw.Engine(model, optimizer, zero=0)
        trained(world, engine, model, x, HALF)
        path = engine.save(folder)
        (line,) = said
        assert "Ticking keeps ticks (a count) in its attribute ticks" in line
        assert "a resume would restart it" in line
        engine.close()

        said.clear()
        x, model, optimizer = made(Ticking)
        optimizer.schedule = Renamed()
        engine = sw.Engine(model, optimizer, zero=0)
        engine.load(path)
        assert "attributes of Ticking cannot be restored from the checkpoint and keep" in said[0]
        assert optimizer.count == HALF
        engine.close()
    finally:
        del world.say_once


def test_values_that_cannot_be_saved_or_restored_are_named(group, tmp_path):
    group(1)(named_case, tmp_path)


DAMAGES = [
    [1, 2],
    {"$map": 3},
    {"$map": [["counts"]]},
    {"$small": [{"$tensor": {"dtype": "F32", "shape": [2], "values": [1.0]}}, False]},
    {"$stored": ["0.average.0"]},
    {"$optimizer": {"groups": [], "state": 3}},
    {"$object": ["Schedule", [1]]},
    {"counts": 1, "beta": 2},
]


def damaged_case(world, folder):
    x, model, optimizer = made(MAKE["all kinds"])
    engine = sw.Engine(model, optimizer, zero=0)
    trained(world, engine, model, x, 1)
    path = engine.save(folder)
    document = path / "checkpoint.json"
    # Version 1 has no checksum of the document.
    fields = json.loads(document.read_text()) | {"version": 1}
    del fields["crc32"]
    attributes = fields["optimizers"][0]["attributes"]
    before = copy.deepcopy(optimizer.nested), optimizer.average[0].clone()
    for damage in DAMAGES:
        fields["optimizers"][0]["attributes"] = attributes | {"nested": damage}
        document.write_text(json.dumps(fields))
        with pytest.raises(BrokenCheckpoint, match=r"The attribute nested of an optimizer is"):
            engine.load(path)
        assert optimizer.nested == before[0]
        assert torch.equal(optimizer.average[0], before[1])
    engine.close()


def test_damaged_attributes_change_nothing(group, tmp_path):
    group(1)(damaged_case, tmp_path)


class Rotating(WarmUp):
    """Replaces a large tensor in an object at each step."""

    def __init__(self, params):
        super().__init__(params)
        self.schedule.recent = torch.zeros(100)
        self.schedule.fixed = torch.zeros(100)

    def step(self, closure=None):
        super().step()
        self.schedule.recent = self.schedule.recent + 1
        torch.zeros(100)  # memory that the next tensor may reuse


def replaced_case(world, folder):
    for steps in (HALF, 2 * HALF):
        x, model, optimizer = made(Rotating)
        engine = sw.Engine(model, optimizer, zero=0)
        engine.resume(folder)
        trained(world, engine, model, x, HALF)
        engine.save(folder)
        engine.close()
        assert optimizer.schedule.recent.tolist() == [steps] * 100


def test_replaced_tensors_in_objects_are_saved(group, tmp_path):
    group(1)(replaced_case, tmp_path)
