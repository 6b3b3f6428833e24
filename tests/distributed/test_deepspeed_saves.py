"""save_checkpoint and load_checkpoint where something is wrong: each fault is every worker's."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from shardwise.errors import CheckpointMismatch, CheckpointNotWritten, ConfigError, UsageError
from tests.distributed.test_deepspeed import close, json_of, loss_of, net, ranks, trained


def refused_case(world, folder):
    engine, _ = trained(world, json_of(1), steps=range(1))
    (Path(folder) / "file").touch()
    world.barrier()
    for save in (engine.save_checkpoint, engine.save_16bit_model):
        with pytest.raises(CheckpointNotWritten, match="cannot be written: Not a directory"):
            save(f"{folder}/file/saved")
    with pytest.raises(UsageError, match="takes the name of a folder"):
        engine.save_checkpoint("")
    engine.save_checkpoint(f"{folder}/saved", tag=f"tag-{world.rank}")  # Warn: that of rank 0
    assert (Path(folder) / "saved" / "latest").read_text() == "tag-0"
    assert not (Path(folder) / "saved" / "tag-1").exists()
    close(engine, world)
    strict = {"checkpoint": {"tag_validation": "Fail"}}
    engine, _ = trained(world, json_of(1, **strict), steps=range(1))
    with pytest.raises(UsageError, match="has the tag 'tag-0' on rank 0 and another"):
        engine.save_checkpoint(f"{folder}/strict", tag=f"tag-{world.rank}")
    close(engine, world)


def test_what_cannot_be_saved_is_said_by_all(group, tmp_path):
    ranks(group, 2)(refused_case, str(tmp_path))


def schedule_case(world, folder):
    """A schedule of another kind is refused before anything changes, or left out."""
    engine, _ = trained(world, json_of(0), steps=range(1))
    engine.save_checkpoint(folder)
    close(engine, world)
    other = {"scheduler": {"type": "CosineAnnealingLR", "params": {"T_max": 5}}}
    engine, _ = trained(world, json_of(0, **other), steps=[])
    before = copy.deepcopy(engine.module.state_dict())
    with pytest.raises(CheckpointMismatch, match="another kind than CosineAnnealingLR: its state"):
        engine.load_checkpoint(folder)
    for name, value in engine.module.state_dict().items():
        assert torch.equal(value, before[name])
    engine.load_checkpoint(folder, load_lr_scheduler_states=False)
    assert engine.global_steps == 1
    close(engine, world)


def test_a_schedule_of_another_kind(group, tmp_path):
    ranks(group, 1)(schedule_case, str(tmp_path))


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
