"""A DeepSpeed checkpoint loads into any placement and world size, with the same losses after it."""

import json
import shutil

import pytest
import torch

import shardwise as sw
import shardwise.deepspeed as deepspeed
from shardwise.errors import BrokenCheckpoint, CheckpointError, CheckpointMismatch
from tests import deepspeed_checkpoints as small
from tests.tables import each_value

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16-mixed": torch.float32}
"""Dtype of the model's input by precision."""


def engine_of(zero, precision="fp32"):
    """Return an engine over the model before its first step, and its scheduler."""
    model = small.made()
    optimizer = small.optimizer_of(model)
    engine = sw.Engine(model, optimizer, zero=zero, precision=precision)
    return engine, model, small.scheduler_of(optimizer)


def continued(world, path, zero, precision="fp32"):
    """Load `path`; return the losses of the next steps, the number of steps, and the last rate."""
    engine, model, scheduler = engine_of(zero, precision)
    engine.track(scheduler=scheduler)
    engine.load(path)
    steps, losses = engine.steps, []
    for step in range(small.STEPS, small.STEPS + small.MORE):
        x, y = small.batch(step, world.rank, world.size)
        loss = (model(x.to(DTYPES[precision])).float() - y).square().mean()
        engine.backward(loss, weight=len(x))
        losses.append(engine.step(max_norm=1.0).loss)
        scheduler.step()
    engine.close()
    return losses, steps, scheduler.get_last_lr()


def trained_there(name):
    return json.loads((small.HERE / name / "losses.json").read_text())["losses"]


DEFAULT = {(1, 0), (2, 3), (3, 2)}
"""World sizes and rows that are tested by default, for every fp32 checkpoint."""

FP32 = ("stage0", "stage1", "stage2", "stage2-round-robin", "stage3", "stage3-groups")


@pytest.mark.parametrize(
    ("size", "zero"),
    [
        pytest.param(size, zero, marks=() if (size, zero) in DEFAULT else pytest.mark.full)
        for size in (1, 2, 3)
        for zero in (0, 2, 3)
    ],
)
@pytest.mark.parametrize("name", FP32)
def test_training_continues_with_the_same_losses(group, name, size, zero):
    rates = [0.01 * 0.9 ** (small.STEPS + small.MORE)] * 2
    for losses, steps, last in group(size)(continued, small.HERE / name, zero):
        assert losses == pytest.approx(trained_there(name), rel=0, abs=1e-6)
        assert steps == small.STEPS
        assert last == pytest.approx(rates)


HALF = [
    *[("bf16", f"stage{stage}-bf16") for stage in range(4)],
    *[("fp16-mixed", f"stage{stage}-fp16") for stage in (0, 2, 3)],
]


@each_value(half=HALF, zero=[0, 3])
def test_training_continues_in_16_bit(group, half, zero):
    """Sums and casts are ordered differently in DeepSpeed, so losses agree to 16-bit precision."""
    precision, name = half
    for losses, steps, _ in group(2)(continued, small.HERE / name, zero, precision):
        assert losses == pytest.approx(trained_there(name), rel=0, abs=5e-3)
        assert steps == small.STEPS


def refused(world, path, kind):
    """Return the message of a load of `path`, and whether the model is unchanged."""
    engine, model, scheduler = engine_of(2)
    engine.track(scheduler=scheduler)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(kind) as raised:
        engine.load(path)
    with engine.full_parameters():
        same = all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    engine.close()
    return str(raised.value), same


def test_a_truncated_file_changes_nothing(group, tmp_path):
    shutil.copytree(small.HERE / "stage3", tmp_path / "cut")
    file = next((tmp_path / "cut").glob("*/*rank_1*optim_states.pt"))
    file.write_bytes(file.read_bytes()[:-100])
    for said, same in group(2)(refused, tmp_path / "cut", BrokenCheckpoint):
        assert "is truncated" in said
        assert same


def other_optimizers(world, path):
    """Return the messages of a load into SGD and into Adam, instead of AdamW."""
    said = []
    for kind in (torch.optim.SGD, torch.optim.Adam):
        model = small.made()
        groups = small.optimizer_of(model).param_groups
        optimizer = kind([{"params": g["params"], "weight_decay": 0.0} for g in groups], lr=1e-2)
        engine = sw.Engine(model, optimizer, zero=0)
        with pytest.raises(CheckpointMismatch) as raised:
            engine.load(path)
        said.append(str(raised.value))
        engine.load(path, model_only=True)
        engine.close()
    return said


def test_another_optimizer_is_refused(group):
    for sgd, adam in group(1)(other_optimizers, small.HERE / "stage2"):
        assert "unlike SGD here" in sgd
        assert "decoupled_weight_decay, unlike Adam here" in adam


def resumed(world, path):
    engine, *_ = engine_of(2)
    with pytest.raises(CheckpointError) as raised:
        engine.resume(path)
    engine.close()
    return str(raised.value)


def test_resume_says_what_to_write(group, tmp_path):
    shutil.copytree(small.HERE / "stage2", tmp_path / "theirs")
    for said in group(2)(resumed, tmp_path / "theirs"):
        assert 'Write engine.load("' in said


def by_their_interface(world, path, stage):
    """Return the result of load_checkpoint, and of the steps after it."""
    model = small.made()
    optimizer = small.optimizer_of(model)
    config = {
        "train_micro_batch_size_per_gpu": small.ROWS // world.size,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage},
    }
    engine, _, _, scheduler = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        lr_scheduler=small.scheduler_of(optimizer),
        config=config,
    )
    _, client_state = engine.load_checkpoint(path)
    counts, losses = (engine.global_steps, engine.global_samples), []
    for step in range(small.STEPS, small.STEPS + small.MORE):
        x, y = small.batch(step, world.rank, world.size)
        loss = (engine(x) - y).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    rate = scheduler.get_last_lr()[0]
    engine.destroy()
    return losses, client_state, counts, rate


@pytest.mark.parametrize("size", [1, 3])
def test_load_checkpoint_at_another_world_size(group, size):
    found = group(size)(by_their_interface, small.HERE / "stage3", 3)
    means = [sum(each) / size for each in zip(*(losses for losses, *_ in found), strict=True)]
    assert means == pytest.approx(trained_there("stage3"), rel=0, abs=1e-6)
    for _, client_state, counts, rate in found:
        assert client_state == {"epoch": 1, "best": 0.5, "words": ("a",)}
        assert counts == (small.STEPS, small.STEPS * small.ROWS)
        assert rate == pytest.approx(0.01 * 0.9 ** (small.STEPS + small.MORE))
