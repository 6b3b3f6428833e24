"""Training continues from the checkpoints of other libraries with the losses that they have."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import shardwise as sw
from shardwise.checkpoint.commands import checkpoint
from shardwise.errors import CheckpointError, CheckpointMismatch
from tests import foreign_checkpoints as foreign


def continued(world, path, row, kind="adamw", resume=False):
    """Load a checkpoint, and return the number of its steps and the losses of the next ones."""
    model = foreign.build(seed=9)
    engine = sw.Engine(model, foreign.optimizer_of(model, kind), zero=row)
    if resume:
        engine.resume(path)
    else:
        engine.load(path)
    steps, losses = engine.steps, []
    share = foreign.ROWS // world.size
    first, end = world.rank * share, (world.rank + 1) * share
    for step in range(foreign.STEPS, foreign.STEPS + foreign.MORE):
        x, y = foreign.batch(step, first, end)
        engine.backward(foreign.loss_of(model, x, y))
        losses.append(engine.step().loss)
    engine.close()
    return steps, losses


@pytest.mark.parametrize(
    ("kind", "optimizer", "row"),
    [
        (kind, optimizer, row)
        for number, kind in enumerate(foreign.WRITERS)
        for optimizer, row in [(("adamw", "sgd")[number % 2], (0, 3, 2)[number % 3])]
    ],
)
def test_load_continues_with_the_same_losses(group, tmp_path, kind, optimizer, row):
    path, losses = foreign.write(kind, tmp_path, optimizer)
    # Without a step count, the optimizer's own is used. SGD has none.
    steps = 0 if kind in ("ddp dict", "accelerate") and optimizer == "sgd" else foreign.STEPS
    for found, ours in group(2)(continued, path, row, optimizer):
        assert ours == pytest.approx(losses, rel=1e-9)
        assert found == steps


def fsdp2_case(world, folder, row):
    """Train with FSDP2 on all ranks, save with DCP, and continue here and there."""
    if not dist.is_initialized():
        store = dist.FileStore(str(folder / "store"), world.size)
        dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)
        world.barrier()
    theirs = foreign.build()
    mesh = init_device_mesh("cpu", (world.size,))
    fully_shard(theirs.norm, mesh=mesh)
    # Columns of this one are split, so its chunks are boxes of several rows.
    theirs.register_parameter(
        "wide", nn.Parameter(distribute_tensor(torch.eye(4).double(), mesh, [Shard(1)]))
    )
    fully_shard(theirs, mesh=mesh, ignored_params={theirs.wide})
    optimizer = foreign.optimizer_of(theirs)
    foreign.train(theirs, optimizer, 0, foreign.STEPS)
    of_model, of_optimizer = get_state_dict(theirs, optimizer)
    dcp.save({"model": of_model, "optim": of_optimizer, "step": 3}, checkpoint_id=folder / "dcp")
    losses = foreign.train(theirs, optimizer, foreign.STEPS, foreign.MORE)
    dist.destroy_process_group()
    model = foreign.build(seed=9)
    model.wide = nn.Parameter(torch.zeros(4, 4).double())
    engine = sw.Engine(model, foreign.optimizer_of(model), zero=row)
    engine.load(folder / "dcp")
    with engine.full_parameters():
        assert torch.equal(model.wide, torch.eye(4).double())
    share, ours = foreign.ROWS // world.size, []
    for step in range(foreign.STEPS, foreign.STEPS + foreign.MORE):
        x, y = foreign.batch(step, world.rank * share, (world.rank + 1) * share)
        engine.backward(foreign.loss_of(model, x, y))
        ours.append(engine.step().loss)
    engine.close()
    assert ours == pytest.approx(losses, rel=1e-9)


def test_sharded_checkpoint_of_fsdp2_loads(group, tmp_path):
    group(2, transport="shared")(fsdp2_case, tmp_path, 3, limit=120)


@pytest.mark.parametrize("kind", ["torch dict", "dcp"])
def test_resume_from_an_import(group, tmp_path, kind):
    path, losses = foreign.write(kind, tmp_path, "one")
    told = CliRunner().invoke(checkpoint, ["import", str(path), str(tmp_path / "run")])
    assert told.exit_code == 0, told.output
    assert "has no seed" in told.output
    for steps, ours in group(2)(continued, tmp_path / "run", 3, "one", True):
        assert steps == foreign.STEPS
        assert ours == pytest.approx(losses, rel=1e-9)


def mismatch_case(world, folder):
    """Optimizers that differ are refused before anything changes."""
    model = foreign.build(seed=9)
    engine = sw.Engine(model, foreign.optimizer_of(model, "one"))
    before = model.lin.weight.detach().clone()
    # Positions in other groups would give parameters the state of others.
    with pytest.raises(CheckpointMismatch, match=r"optimizer groups of \[2, 3\]"):
        engine.load(folder / "ckpt.pt")
    # Names would give some parameters the options of others.
    with pytest.raises(CheckpointMismatch, match="different options"):
        engine.load(folder / "dcp")
    assert torch.equal(model.lin.weight, before)
    assert engine.steps == 0
    engine.load(folder / "dcp", model_only=True)
    assert engine.steps == 0
    assert not torch.equal(model.lin.weight, before)
    engine.close()


def test_other_groups_are_refused(group, tmp_path):
    for kind in ("torch dict", "dcp"):
        foreign.write(kind, tmp_path)
    group(2)(mismatch_case, tmp_path)


def adapter_case(world, folder):
    """The file of an adapter leaves out the adapter's name, which the model's names have."""
    from peft import LoraConfig, get_peft_model

    def build(seed):
        model = foreign.build(seed)
        config = LoraConfig(target_modules=["lin", "emb"], r=2, init_lora_weights=False)
        return get_peft_model(model, config)

    theirs = build(3)
    if world.is_main:
        theirs.save_pretrained(folder / "adapter")
    world.barrier()
    model = build(4)
    trained = [p for p in model.parameters() if p.requires_grad]
    engine = sw.Engine(model, torch.optim.AdamW(trained), zero=3)
    engine.load(folder / "adapter", strict=False)
    with engine.full_parameters():
        for (name, ours), wanted in zip(model.named_parameters(), theirs.parameters(), strict=True):
            assert torch.equal(ours, wanted) or "lora_" not in name, name
    engine.close()


@pytest.mark.full
def test_adapter_of_peft_loads(group, tmp_path):
    group(2)(adapter_case, tmp_path)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")  # Lightning warns about few workers, small data and more
def test_file_of_lightnings_trainer_continues(group, tmp_path):
    """Its names have the prefix of the attribute that holds the model."""
    path, losses = foreign.lightning(tmp_path)
    for steps, ours in group(2)(continued, path, 3):
        assert steps == foreign.STEPS
        assert ours == pytest.approx(losses, rel=1e-9)


def resume_case(world, folder):
    """A folder of another library does not let a run silently start from scratch."""
    model = foreign.build(seed=9)
    engine = sw.Engine(model, foreign.optimizer_of(model))
    with pytest.raises(CheckpointError, match=r"contains a checkpoint of torch DCP.*engine\.load"):
        engine.resume(folder)
    engine.close()


def test_resume_refuses_a_folder_of_another_library(group, tmp_path):
    path, _ = foreign.write("dcp", tmp_path)
    group(2)(resume_case, path)
