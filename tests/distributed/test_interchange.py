"""Training continues from the checkpoints of other libraries with the losses that they have."""

import types
import warnings

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


def continued(world, path, row, kind="adamw", resume=False, model_kind=foreign.Net):
    """Load a checkpoint, and return the number of its steps and the losses of the next ones."""
    model = foreign.build(seed=9, kind=model_kind)
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
    has_none = kind in ("ddp dict", "accelerate", "timm")
    steps = 0 if has_none and optimizer == "sgd" else foreign.STEPS
    for found, ours in group(2)(continued, path, row, optimizer):
        assert ours == pytest.approx(losses, rel=1e-9)
        assert found == steps


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
@pytest.mark.parametrize("library", foreign.OF_LAYERS)
def test_sharded_layouts_continue_with_the_same_losses(group, tmp_path, library, kind):
    """Layers are unstacked, shards put together, and groups told apart."""
    path, losses = foreign.write(library, tmp_path, kind, foreign.Layers)
    for found, ours in group(2)(continued, path, 3, kind, False, foreign.Layers):
        assert ours == pytest.approx(losses, rel=1e-9)
        assert found == foreign.STEPS


def fsdp1_case(world, folder, row):
    """Train with FSDP1 on all ranks, save shards with DCP and Accelerate, and continue here."""
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    if not dist.is_initialized():
        store = dist.FileStore(str(folder / "store1"), world.size)
        dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)
        world.barrier()
    policy = ModuleWrapPolicy({nn.LayerNorm})
    options = {"use_orig_params": True, "device_id": torch.device("cpu")}
    theirs = FullyShardedDataParallel(foreign.build(), auto_wrap_policy=policy, **options)
    optimizer = foreign.optimizer_of(theirs)
    foreign.train(theirs, optimizer, 0, foreign.STEPS)
    from accelerate import PartialState
    from accelerate.utils.fsdp_utils import save_fsdp_model, save_fsdp_optimizer

    PartialState(cpu=True)
    here = types.SimpleNamespace(num_processes=world.size, process_index=world.rank)
    plugin = types.SimpleNamespace(
        fsdp_version=1,
        state_dict_type=StateDictType.SHARDED_STATE_DICT,
        state_dict_config=None,
        optim_state_dict_config=None,
    )
    sharded = StateDictType.SHARDED_STATE_DICT
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that FSDP1 and its state_dicts are deprecated
        FullyShardedDataParallel.set_state_dict_type(theirs, sharded)
        of_optimizer = FullyShardedDataParallel.optim_state_dict(theirs, optimizer)
        state = {"model": theirs.state_dict(), "optim": of_optimizer, "step": foreign.STEPS}
        dcp.save(state, checkpoint_id=folder / "dcp")
        save_fsdp_model(plugin, here, theirs, folder / "accelerate")
        save_fsdp_optimizer(plugin, here, optimizer, theirs, folder / "accelerate")
    PartialState._reset_state()
    losses = foreign.train(theirs, optimizer, foreign.STEPS, foreign.MORE)
    dist.destroy_process_group()
    for path in ("dcp", "accelerate"):
        steps, ours = continued(world, folder / path, row)
        assert ours == pytest.approx(losses, rel=1e-9), path
        assert steps == foreign.STEPS


def test_shards_of_fsdp1_load(group, tmp_path):
    group(2)(fsdp1_case, tmp_path, 3, limit=120)


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
    """Load an adapter, train on as PEFT does, and export an adapter that PEFT loads.

    The file of an adapter leaves out the adapter's name, which the model's names have.
    """
    from peft import LoraConfig, PeftModel, get_peft_model

    def build(seed):
        model = foreign.build(seed=3)
        torch.manual_seed(seed)
        config = LoraConfig(
            target_modules=["lin", "emb"], modules_to_save=["norm"], r=2, init_lora_weights=False
        )
        return get_peft_model(model, config)

    def trained(model):
        return [p for p in model.parameters() if p.requires_grad]

    theirs = build(1)
    if world.is_main:
        theirs.save_pretrained(folder / "adapter")
    world.barrier()
    losses = foreign.train(theirs, torch.optim.AdamW(trained(theirs)), 0, foreign.MORE)
    model = build(2)
    engine = sw.Engine(model, torch.optim.AdamW(trained(model)), zero=3)
    engine.load(folder / "adapter", strict=False)
    ours, share = [], foreign.ROWS // world.size
    for step in range(foreign.MORE):
        x, y = foreign.batch(step, world.rank * share, (world.rank + 1) * share)
        engine.backward(foreign.loss_of(model, x, y))
        ours.append(engine.step().loss)
    assert ours == pytest.approx(losses, rel=1e-9)
    engine.save(folder / "run")
    if world.is_main:
        told = CliRunner().invoke(checkpoint, ["export", str(folder / "run"), str(folder / "back")])
        assert told.exit_code == 0, told.output
        back = PeftModel.from_pretrained(foreign.build(seed=3), folder / "back")
        for (name, value), wanted in zip(back.named_parameters(), theirs.parameters(), strict=True):
            assert torch.allclose(value, wanted, rtol=1e-9), name
    world.barrier()
    engine.close()


def test_adapter_of_peft_continues(group, tmp_path):
    group(2)(adapter_case, tmp_path)


def gpt2_case(world, folder):
    """Load a folder of Transformers, train on as in plain PyTorch, and export it again."""
    from transformers import GPT2Config, GPT2LMHeadModel

    def build(seed):
        torch.manual_seed(seed)
        sizes = {"n_embd": 8, "n_layer": 2, "n_head": 2, "vocab_size": 11, "n_positions": 8}
        drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        config = GPT2Config(**sizes, **drops, bos_token_id=0, eos_token_id=0)
        return GPT2LMHeadModel(config).double()

    def loss_of(model, first, end):
        x = foreign.batch(first)[0][slice(*end)]
        return model(input_ids=x, labels=x).loss

    theirs = build(1)
    if world.is_main:
        theirs.save_pretrained(folder / "hf", max_shard_size="4KB")
    world.barrier()
    optimizer, losses = torch.optim.AdamW(theirs.parameters()), []
    for step in range(foreign.MORE):
        optimizer.zero_grad()
        loss = loss_of(theirs, step, (None,))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model = build(2)
    engine = sw.Engine(model, torch.optim.AdamW(model.parameters()), zero=3)
    engine.load(folder / "hf")
    ours, share = [], foreign.ROWS // world.size
    for step in range(foreign.MORE):
        own = (world.rank * share, (world.rank + 1) * share)
        engine.backward(loss_of(model, step, own))
        ours.append(engine.step().loss)
    assert ours == pytest.approx(losses, rel=1e-6)
    engine.save(folder / "run")
    if world.is_main:
        words = ["export", str(folder / "run"), str(folder / "back")]
        told = CliRunner().invoke(checkpoint, words)
        assert told.exit_code == 0, told.output
        back = GPT2LMHeadModel.from_pretrained(folder / "back", dtype=torch.float64)
        for value, wanted in zip(back.parameters(), theirs.parameters(), strict=True):
            assert torch.allclose(value, wanted, rtol=1e-6)
    world.barrier()
    engine.close()


def test_folder_of_transformers_continues(group, tmp_path):
    group(2)(gpt2_case, tmp_path)


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
