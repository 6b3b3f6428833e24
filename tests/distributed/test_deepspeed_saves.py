"""save_checkpoint and load_checkpoint where something is wrong: each fault is every worker's."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from shardwise.errors import (
    CheckpointError,
    CheckpointMismatch,
    CheckpointNotWritten,
    ConfigError,
    UsageError,
)
from tests.distributed.test_deepspeed import close, json_of, loss_of, net, ranks, run, trained


def refused_case(world, folder):
    engine, _ = trained(world, json_of(1), steps=range(1))
    (Path(folder) / "file").touch()
    world.barrier()
    for save in (engine.save_checkpoint, engine.save_16bit_model):
        with pytest.raises(CheckpointNotWritten, match="cannot be written: Not a directory"):
            save(f"{folder}/file/saved")
    with pytest.raises(UsageError, match="needs the name of a folder"):
        engine.save_checkpoint("")
    engine.save_checkpoint(f"{folder}/saved", tag=f"tag-{world.rank}")  # Warn: rank 0's tag
    assert (Path(folder) / "saved" / "latest").read_text() == "tag-0"
    assert not (Path(folder) / "saved" / "tag-1").exists()
    close(engine, world)
    strict = {"checkpoint": {"tag_validation": "Fail"}}
    engine, _ = trained(world, json_of(1, **strict), steps=range(1))
    with pytest.raises(AssertionError, match="has the tag 'tag-0' on rank 0 and another"):
        engine.save_checkpoint(f"{folder}/strict", tag=f"tag-{world.rank}")
    close(engine, world)


def earlier_case(world, folder):
    """A save whose step does not name its client file yet, which was called by its number."""
    engine, _ = trained(world, json_of(1), steps=range(1))
    place = Path(folder) / "earlier"
    if world.is_main:
        place.mkdir()
        (Path(folder) / "latest").write_text("earlier")
        counts = {"global_steps": 7}
        content = {"client_state": {"epoch": 3}, "lr_scheduler": None, "counts": counts}
        torch.save(content, place / "client-1.pt")
    world.barrier()
    engine._engine("save").save(place)
    assert engine.load_checkpoint(folder) == (str(place), {"epoch": 3})
    assert engine.global_steps == 7
    close(engine, world)


def test_an_earlier_save_is_read(group, tmp_path):
    ranks(group, 2)(earlier_case, str(tmp_path))


def test_what_cannot_be_saved_is_said_by_all(group, tmp_path):
    ranks(group, 2)(refused_case, str(tmp_path))


def schedule_case(world, folder):
    """Load a different kind of schedule: an error before any change, or skipped on request."""
    engine, _ = trained(world, json_of(0), steps=range(1))
    engine.save_checkpoint(folder)
    close(engine, world)
    other = {"scheduler": {"type": "CosineAnnealingLR", "params": {"T_max": 5}}}
    engine, _ = trained(world, json_of(0, **other), steps=[])
    before = copy.deepcopy(engine.module.state_dict())
    with pytest.raises(
        CheckpointMismatch, match="has the schedule WarmupLR, but this script has Cosine"
    ):
        engine.load_checkpoint(folder)
    for name, value in engine.module.state_dict().items():
        assert torch.equal(value, before[name])
    engine.load_checkpoint(folder, load_lr_scheduler_states=False)
    assert engine.global_steps == 1
    close(engine, world)


def test_a_schedule_of_another_kind(group, tmp_path):
    ranks(group, 1)(schedule_case, str(tmp_path))


def older_case(world, folder):
    """A state of torch's StepLR with an entry that this torch has not, and schedules without a
    state."""
    import shardwise.deepspeed as deepspeed

    def made(schedule_of):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=optimizer,
            lr_scheduler=schedule_of(optimizer),
            config={"train_micro_batch_size_per_gpu": 4},
        )
        return engine

    class Older(torch.optim.lr_scheduler.StepLR):
        def state_dict(self):
            return super().state_dict() | {"verbose": False}

    Older.__name__ = "StepLR"
    engine = made(lambda optimizer: Older(optimizer, 1))
    run(world, engine, range(1))
    engine.save_checkpoint(folder)
    engine.destroy()
    engine = made(lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1))
    engine.load_checkpoint(folder)
    assert engine.lr_scheduler.last_epoch == 1
    engine.destroy()

    class Bare:
        def __init__(self, optimizer):
            del optimizer

        def step(self):
            pass

    engine = made(Bare)
    with pytest.raises(CheckpointMismatch, match=r"Bare in this script has no state_dict\(\)"):
        engine.load_checkpoint(folder)
    assert engine.save_checkpoint(f"{folder}/bare")
    engine.load_checkpoint(f"{folder}/bare")
    engine.destroy()


def test_a_schedule_of_an_older_torch_and_one_without_a_state(group, tmp_path):
    ranks(group, 1)(older_case, str(tmp_path))


def cut_off_case(world, folder):
    """A second save of one step that is cut off after its client file leaves the first as it is."""
    engine, _ = trained(world, json_of(1), steps=range(1))
    engine.save_checkpoint(folder, client_state={"save": 1})
    inner = engine._parts.engine

    def killed(place):
        raise KeyboardInterrupt

    inner.save = killed
    with pytest.raises(KeyboardInterrupt):
        engine.save_checkpoint(folder, client_state={"save": 2})
    del inner.save
    assert engine.load_checkpoint(folder)[1] == {"save": 1}
    engine.save_checkpoint(folder, client_state={"save": 3})
    assert engine.load_checkpoint(folder)[1] == {"save": 3}
    assert len(list(Path(folder).glob("*/client-*"))) == 1
    close(engine, world)


def test_a_save_that_is_cut_off_leaves_a_pair(group, tmp_path):
    ranks(group, 1)(cut_off_case, str(tmp_path))


def faults_case(world, folder):
    """An error on one worker is raised on all workers."""
    from shardwise.bridging.written_files import on_main
    from shardwise.checkpoint.deepspeed import as_checkpoint
    from tests import deepspeed_checkpoints as small

    def wrong():
        raise ValueError("no number")

    with pytest.raises(CheckpointNotWritten, match="cannot be written: ValueError: no number"):
        on_main(world, Path(folder), wrong)
    engine, _ = trained(world, json_of(1), steps=[])
    bad = {"client_state": {"bad": object()}} if world.is_main else {}
    with pytest.raises(UsageError, match="without running code"):
        engine.save_checkpoint(folder, **bad)
    opened = as_checkpoint.opened
    if world.rank == 1:
        as_checkpoint.opened = lambda place: wrong()
    try:
        with pytest.raises(CheckpointError, match="cannot be read: ValueError: no number"):
            engine.load_checkpoint(small.HERE / "stage2")
    finally:
        as_checkpoint.opened = opened
    close(engine, world)


def test_a_fault_of_one_worker_is_every_workers(group, tmp_path):
    ranks(group, 2)(faults_case, str(tmp_path))


def split_case(world):
    """autotp_size of the JSON divides layers over workers, after the run was joined."""
    import shardwise.deepspeed as deepspeed
    from shardwise.bridging.joining import divide

    def made():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 3)).double()

    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    plain = made()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01, weight_decay=0.1)
    expected = []
    for _ in range(3):
        loss = loss_of(plain, x, x[:, :3].sin())
        loss.backward()
        expected += [loss.item(), nn.utils.clip_grad_norm_(plain.parameters(), 1.0).item()]
        optimizer.step()
        optimizer.zero_grad()
    tree = json_of(0, tensor_parallel={"autotp_size": 2})
    del tree["scheduler"]
    engine, *_ = deepspeed.initialize(model=made(), config=tree)
    assert (world.tensor_size, world.data_size, engine.train_batch_size()) == (2, 1, 4)
    seen = []
    for _ in range(3):
        loss = loss_of(engine, x, x[:, :3].sin())
        engine.backward(loss)
        engine.step()
        seen += [loss.item(), engine.get_global_grad_norm()]
    assert seen == pytest.approx(expected, rel=1e-8)
    state = engine.module_state_dict()
    assert not world.is_main or state["0.weight"].shape == (8, 4)
    engine.destroy()
    divide(world, "the test", tensor=1)
    with pytest.raises(ConfigError, match=r"--tensor 3 does not divide 2 worker"):
        deepspeed.initialize(model=net(), config=json_of(0, tensor_parallel={"autotp_size": 3}))


def test_autotp_size(group):
    group(2, quiet=True)(split_case)
