"""A checkpoint is independent of the run that wrote it: any placement, tier and world size loads
it."""

import dataclasses
import json
import shutil
from itertools import product
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

import shardwise as sw
from shardwise.comm import hybrid_shard
from shardwise.errors import BrokenCheckpoint, CheckpointError, CheckpointMismatch
from shardwise.states.storage import storage
from tests.disk import on_a_disk
from tests.distributed.test_engine import ROWS, batch
from tests.tables import covering, each_value

STEPS = 4


class Everything(nn.Module):
    """Tied and frozen weights, buffers, channels_last memory, a layer that is sometimes skipped."""

    def __init__(self, drop=0.0):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6), nn.Dropout(drop), nn.Tanh()) for _ in range(3)
        )
        self.conv = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
        self.still = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
        self.still.requires_grad_(False)
        self.norm = nn.BatchNorm1d(6)
        self.rarely = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x, step):
        x = self.embed((x.abs() * 10).long().clamp(max=10))
        for block in self.blocks:
            x = block(x)
        x = self.norm(x.flatten(0, 1)).view_as(x)
        if step % 3 == 2:
            x = self.rarely(x)
        picture = x.reshape(len(x), 3, 4, 3)
        return self.head(x).mean() + self.conv(picture).square().mean()


def made(drop=0.0, dtype=torch.float32):
    torch.manual_seed(5)
    return Everything(drop).to(dtype)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def engine_of(model, optimizer=adamw, **settings):
    return sw.Engine(model, optimizer(model), bucket_mb=0.0005, **settings)


def train(world, engine, model, steps):
    told = []
    for step in steps:
        x = world.share(batch(step).float())
        engine.backward(model(x, step).float())
        told.append(engine.step().loss)
    return told


def whole(engine, model):
    """Return all full values that the engine holds: model, optimizer and averages."""
    with engine.full_parameters():
        values = {f"model {name}": v.clone() for name, v in model.state_dict().items()}
    for number, state in engine.optimizer_state_dict()["state"].items():
        for key, value in state.items():
            values[f"state {number} {key}"] = torch.as_tensor(value).clone()
    if engine.settings.ema_decay is not None:
        with engine.ema(), engine.full_parameters():
            values |= {
                f"average {name}": p.detach().clone() for name, p in model.named_parameters()
            }
    return values


def alike(mine, theirs):
    assert mine.keys() == theirs.keys(), sorted(mine.keys() ^ theirs.keys())
    for name, value in mine.items():
        assert torch.equal(value, theirs[name]), f"{name}: {value} {theirs[name]}"


def saves(world, folder, optimizer=adamw, **settings):
    """Train from scratch and save; return the path and all values."""
    model = made()
    engine = engine_of(model, optimizer, **settings)
    train(world, engine, model, range(STEPS))
    path = engine.save(folder)
    values = whole(engine, model)
    engine.close()
    return str(path), values


def loads(world, path, again=None, optimizer=adamw, **settings):
    """Load into another model, save again if asked, and return all values."""
    torch.manual_seed(77)
    model = Everything()
    engine = engine_of(model, optimizer, **settings)
    engine.load(path)
    assert engine.steps == STEPS
    values = whole(engine, model)
    if again is not None:
        engine.save(again)
    engine.close()
    return values


def saves_sharded(world, folder):
    return saves(world, folder, zero=3)


def loads_sharded(world, path):
    return loads(world, path, zero=3)


def rows_case(world, path, folder):
    """Load under every row, and save again under each."""
    found = []
    for row in ROWS:
        world.engines = 0
        found.append(loads(world, path, folder / str(row), zero=row))
    return found


def test_any_row_and_size_and_back(group, tmp_path):
    path, values = group(3)(saves_sharded, tmp_path / "three")[0]
    for size in (1, 2):
        for told in group(size)(rows_case, path, tmp_path / str(size)):
            for mine in told:
                alike(mine, values)
        for row in ROWS:
            again = tmp_path / f"{size}/{row}/step-{STEPS}"
            assert checksums(again) == checksums(path)
    for mine in group(3)(loads_sharded, again):
        alike(mine, values)


def checksums(path):
    return json.loads((Path(path) / "checkpoint.json").read_text())["checksums"]


def gloo_case(world, folder):
    """Save and load with messages for every gather, and a file above the size limit."""
    path, values = saves(world, folder, zero=3)
    alike(loads(world, path, zero=3), values)


def test_without_shared_memory(group, tmp_path):
    group(2, transport="gloo")(gloo_case, tmp_path)


def within_case(world, folder):
    """Sharded within a host: the state that two hosts hold is written once, half by each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hybrid_shard, "host_key", lambda: f"host {world.rank // 2}")
        path, values = saves(world, folder, zero=2, shard_within="host")
        alike(loads(world, path, zero=3, shard_within="host"), values)
    alike(loads(world, path, zero=0), values)


def test_sharded_within_a_host(group, tmp_path):
    group(4)(within_case, tmp_path)


# -- tiers and precision ------------------------------------------------------------------------


def tier_case(world, folder):
    """From a disk to memory and back, span by span."""
    storage.SPAN = 7
    disk = f"nvme:{on_a_disk()}"
    on_disk = {f"offload_{state}": disk for state in ("optimizer", "gradients", "params")}
    path, values = saves(world, folder / "a", zero=3, **on_disk)
    alike(loads(world, path, folder / "b", zero=0), values)
    alike(loads(world, folder / f"b/step-{STEPS}", zero=3, **on_disk), values)
    alike(loads(world, path, zero=1, offload_optimizer=disk), values)


def test_tiers(group, tmp_path):
    group(2)(tier_case, tmp_path)


def precision_case(world, folder):
    """Masters and averages are kept; a run in fp32 starts from the masters."""
    settings = {"precision": "bf16", "ema_decay": 0.5}
    path, values = saves(world, folder, zero=2, **settings)
    assert values["model rarely.weight"].dtype == torch.bfloat16
    for row in (0, 3):
        alike(loads(world, path, zero=row, **settings), values)
    masters = safetensors.torch.load_file(Path(path) / "optimizer.safetensors")
    wide = loads(world, path, zero=1)
    assert torch.equal(wide["model rarely.weight"], masters["rarely.weight.master"])
    assert not torch.equal(wide["model rarely.weight"], values["model rarely.weight"].float())


def test_precision(group, tmp_path):
    group(2)(precision_case, tmp_path)


def adafactor(model):
    return torch.optim.Adafactor(model.parameters(), lr=1e-2)


def whole_case(world, folder, row):
    path, values = saves(world, folder, adafactor, zero=row)
    for other in (0, 3):
        alike(loads(world, path, None, adafactor, zero=other), values)


@pytest.mark.parametrize("row", [0, 2])
def test_optimizers_of_whole_tensors(group, tmp_path, row):
    group(2)(whole_case, tmp_path, row)


class Whole(torch.optim.Optimizer):
    """An optimizer that needs full tensors and has a state tensor of the parameter's shape."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.01})

    def step(self):
        for p in (p for group in self.param_groups for p in group["params"]):
            if p.grad is not None:
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                mean.mul_(0.5).add_(p.grad / (1 + p.grad.norm()))
                p.data.sub_(mean, alpha=self.param_groups[0]["lr"])


class Counting(torch.optim.Optimizer):
    """Updates element by element, and counts steps in a tensor of one element."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.01})

    def step(self):
        for p in (p for group in self.param_groups for p in group["params"]):
            if p.grad is not None:
                state = self.state[p]
                mean = state.setdefault("mean", torch.zeros_like(p))
                count = state.setdefault("count", torch.zeros(1)).add_(1)
                mean.mul_(0.5).add_(p.grad)
                p.data.sub_(mean / count.item(), alpha=self.param_groups[0]["lr"])


def counting(model):
    return Counting(model.parameters())


def own_optimizer(model):
    return Whole(model.parameters())


def own_optimizer_case(world, folder):
    path, values = saves(world, folder, own_optimizer, zero=2)
    assert any(".mean" in name for name in checksums(path)["optimizer"])
    for row in (0, 3):
        alike(loads(world, path, None, own_optimizer, zero=row), values)
    engine = engine_of(made(), zero=1)
    with pytest.raises(CheckpointMismatch, match=r"Whole with 1 group.*AdamW with 1 group"):
        engine.load(path)
    engine.load(path, model_only=True)
    assert engine.steps == 0
    engine.close()


def groups_case(world, folder):
    """Load parameter groups in a different order, which would mix up learning rates and decays."""

    def grouped(step):
        def make(model):
            by_size = [[p for p in model.parameters() if (p.ndim > 1) == m] for m in (True, False)]
            return torch.optim.SGD([{"params": several} for several in by_size[::step]], lr=0.1)

        return make

    path, _ = saves(world, folder, grouped(1))
    engine = engine_of(made(), grouped(-1))
    with pytest.raises(CheckpointMismatch, match="parameter group 0 here, but was in group 1"):
        engine.load(path)
    engine.close()


def test_parameter_groups_in_another_order(group, tmp_path):
    group(1)(groups_case, tmp_path)


def test_an_optimizer_of_the_users_own(group, tmp_path):
    group(2)(own_optimizer_case, tmp_path)


def several_case(world, folder, row):
    """Two models, two optimizers with groups, a parameter outside both models, a loss scale."""

    def make(seed):
        torch.manual_seed(seed)
        models = nn.Linear(6, 5), nn.Linear(5, 3)
        heat = nn.Parameter(torch.randn(3))
        groups = [{"params": [models[1].weight]}, {"params": [models[1].bias, heat], "lr": 0.2}]
        optimizers = (
            torch.optim.AdamW(models[0].parameters(), lr=1e-2, betas=(0.8, 0.9)),
            torch.optim.SGD(groups, lr=0.1, momentum=0.9),
        )
        engine = sw.Engine(models, optimizers, zero=row, precision="fp16-mixed")
        return models, heat, optimizers, engine

    models, heat, optimizers, engine = make(1)
    for step in range(3):
        hidden = models[0](world.share(batch(step).float()))
        engine.backward((models[1](hidden) * heat).square().mean())
        engine.step()
    engine._state.scale.value = 512.0
    optimizers[1].param_groups[1]["lr"] = 0.05
    path = engine.save(folder)
    told = [engine.optimizer_state_dict(optimizer) for optimizer in optimizers]
    with engine.full_parameters():
        values = [p.detach().clone() for p in (*models[0].parameters(), heat)]
    engine.close()
    models, heat, optimizers, engine = make(2)
    engine.load(path)
    assert engine.loss_scale == 512.0
    assert optimizers[0].param_groups[0]["betas"] == (0.8, 0.9)
    assert optimizers[1].param_groups[1]["lr"] == 0.05
    with engine.full_parameters():
        pairs = zip(values, (*models[0].parameters(), heat), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
    for before, optimizer in zip(told, optimizers, strict=True):
        after = engine.optimizer_state_dict(optimizer)
        assert after["state"].keys() == before["state"].keys()
        for number, state in before["state"].items():
            for key, value in state.items():
                assert torch.equal(
                    torch.as_tensor(after["state"][number][key]), torch.as_tensor(value)
                )
    engine.close()


@pytest.mark.parametrize("row", [0, 2, 3])
def test_several_models_and_optimizers(group, tmp_path, row):
    group(2)(several_case, tmp_path, row)


# -- resuming -----------------------------------------------------------------------------------


def training(row, folder, **settings):
    """A model with dropout, a shuffled Loader and a scheduler; all tracked, and resumed."""
    model = made(drop=0.4)
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5, 8], gamma=0.5)
    engine = sw.Engine(model, optimizer, zero=row, bucket_mb=0.0005, **settings)
    loader = sw.Loader([row for n in range(5) for row in batch(n).float()], 8, shuffle=True)
    engine.track(loader=loader, scheduler=scheduler)
    engine.resume(folder)
    return model, engine, loader, scheduler


def resume_case(world, folder, row, steps):
    """Interrupted after `steps`, a run continues with the same bits."""

    def run(until, folder, save_at=None):
        model, engine, loader, scheduler = training(row, folder, ema_decay=0.9)
        told = []
        for _ in loader.epochs(3):
            for x in loader:
                engine.backward(model(x, engine.steps))
                told.append(engine.step().loss)
                scheduler.step()
                if engine.steps == save_at:
                    engine.save(folder)
                if engine.steps == until:
                    break
            scheduler.step()
            if engine.steps == until:
                break
        values = whole(engine, model) | {"rate": torch.tensor(scheduler.get_last_lr())}
        engine.close()
        return told, values

    told, values = run(9, folder / "none")
    world.engines = 0
    before, _ = run(8, folder / "some", save_at=steps)
    world.engines = 0
    after, again = run(9, folder / "some")
    assert told == before[:steps] + after
    alike(again, values)


@pytest.mark.parametrize("row", ROWS)
def test_resume_has_the_same_bits(group, tmp_path, row):
    group(2)(resume_case, tmp_path, row, 7)


def test_resume_from_the_last_step_of_an_epoch(group, tmp_path):
    """The script's work at the end of the epoch is still to do."""
    group(2)(resume_case, tmp_path, 0, 6)


def seed_case(world, folder):
    """A run without a chosen seed continues with the saved one, and so does its Loader."""
    world.settings = dataclasses.replace(world.settings, seed=None)
    world.seed = 11
    _, engine, loader, _ = training(0, folder)
    batches = iter(loader)
    next(batches)
    engine.save(folder)
    second = next(batches)
    engine.close()
    world.seed, world.engines = 12, 0
    _, engine, loader, _ = training(0, folder)
    assert world.seed == 11
    assert torch.equal(next(iter(loader)), second)
    engine.close()


def test_the_seed_is_restored(group, tmp_path):
    group(1)(seed_case, tmp_path)


def damage_case(world, folder):
    """A flipped bit, a truncated file and a missing file are each reported by name."""
    path, _ = saves(world, folder, zero=1)
    model, path = made(), Path(path)
    engine = engine_of(model, zero=3)
    file = path / "optimizer.safetensors"
    data = file.read_bytes()
    damages = [
        (data[:-1] + bytes([data[-1] ^ 1]), BrokenCheckpoint, r"of the set optimizer.*CRC-32"),
        (data[:-9], BrokenCheckpoint, r"optimizer\.safetensors.*cut short"),
        (None, BrokenCheckpoint, r"optimizer\.safetensors.*No such file"),
    ]
    for content, error, said in damages:
        world.barrier()
        if world.is_main:
            file.unlink() if content is None else file.write_bytes(content)
        world.barrier()
        with pytest.raises(error, match=said):
            engine.load(path)
    # If one rank finds damage, all ranks raise, even if another finds something missing.
    world.barrier()
    if world.is_main:
        file.write_bytes(data)
        file = path / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-1] + b"?")
    world.barrier()
    engine.track(unknown=torch.optim.SGD([torch.ones(1)], lr=0.1))
    with pytest.raises(BrokenCheckpoint, match=r"of the set model.*CRC-32"):
        engine.load(path)
    world.barrier()
    engine.close()


def test_damage_is_told(group, tmp_path):
    group(2)(damage_case, tmp_path)


def passed_over_case(world, folder, field, value):
    """If the newest checkpoint is damaged, the one before is used; if all are, resume raises."""
    model = made()
    engine = engine_of(model, zero=1)
    for step in range(3):
        train(world, engine, model, [step])
        engine.save(folder)
        if engine.steps == 2:
            wanted = whole(engine, model)
    engine.close()
    world.barrier()
    if world.is_main:
        document = folder / "step-3" / "checkpoint.json"
        fields = json.loads(document.read_bytes())
        document.write_text(json.dumps(fields | {field: value}))
    world.barrier()

    def fresh():
        world.engines = 0
        torch.manual_seed(77)
        return Everything()

    model = fresh()
    engine = engine_of(model, zero=3)
    assert engine.resume(folder) == 2
    alike(whole(engine, model), wanted)
    train(world, engine, model, [2])
    assert engine.save(folder) == folder / "step-3"
    engine.close()

    assert engine_of(fresh(), zero=0).resume(folder) == 3  # its save has replaced the damaged one
    world.barrier()
    if world.is_main:
        for path in folder.glob("step-*/model.safetensors"):
            path.write_bytes(path.read_bytes()[:-1])
    world.barrier()
    model = fresh()
    engine = engine_of(model, zero=2)
    before = whole(engine, model)
    with pytest.raises(BrokenCheckpoint, match=r"step-3.*cut short.*Nor is any of the 2 before it"):
        engine.resume(folder)
    alike(whole(engine, model), before)


@each_value(
    field=[
        ("tracked", {"loader": {"$tuple": 3}}),
        ("state", {"head.weight": {"step": {"$tuple": 3}}}),
        ("state", {"head.weight": 4}),
        ("optimizers", [{"class": "AdamW", "groups": [[]]}]),
    ],
    size=[1, 2],
)
def test_a_damaged_one_is_passed_over(group, tmp_path, size, field):
    group(size)(passed_over_case, tmp_path, *field)


# -- frozen on the way --------------------------------------------------------------------------


def freezes(world, folder, row, optimizer):
    """Train, freeze a block, train on and save. Then train one step frozen, and two with all.

    Thawing the block leads to a new layout of the states, which the load must undo.
    """
    model = made()
    engine = engine_of(model, optimizer, zero=row)
    train(world, engine, model, range(2))
    model.blocks[1].requires_grad_(False)
    model.still.requires_grad_(True)
    train(world, engine, model, [2])
    trained = {named.name for named in engine._states.parameters.named}
    assert "still.weight" in trained
    assert "blocks.1.0.weight" not in trained
    path = engine.save(folder)
    train(world, engine, model, [3])
    model.blocks[1].requires_grad_(True)
    told = train(world, engine, model, [4, 5])
    values = whole(engine, model)
    engine.close()
    return str(path), told, values


def thaws(world, path, row, optimizer, when):
    """Continue from the checkpoint; the block is frozen before or after the load."""
    torch.manual_seed(77)
    model = Everything()
    if when == "before":
        model.blocks[1].requires_grad_(False)
    engine = engine_of(model, optimizer, zero=row)
    engine.load(path)
    model.blocks[1].requires_grad_(False)
    model.still.requires_grad_(True)
    train(world, engine, model, [3])
    model.blocks[1].requires_grad_(True)
    told = train(world, engine, model, [4, 5])
    values = whole(engine, model)
    engine.close()
    return told, values


@pytest.mark.parametrize(
    ("optimizer", "row", "when"),
    covering(product((adamw, own_optimizer, counting), (0, 3), ("before", "after"))),
)
def test_state_of_a_block_that_was_frozen_later_is_restored(group, tmp_path, optimizer, row, when):
    path, losses, values = group(2)(freezes, tmp_path, row, optimizer)[0]
    for told, mine in group(2)(thaws, path, row, optimizer, when):
        assert told == losses
        alike(mine, values)


# -- read by others -----------------------------------------------------------------------------


def stock_case(world, folder):
    path, values = saves(world, folder, zero=3)
    if world.is_main:
        fresh = Everything()
        safetensors.torch.load_model(fresh, Path(path) / "model.safetensors")
        for name, value in fresh.state_dict().items():
            assert torch.equal(value, values[f"model {name}"]), name


def test_the_stock_library_reads_it(group, tmp_path):
    group(2)(stock_case, tmp_path)


def transformers_case(world, folder):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=50, n_positions=32, n_embd=16, n_layer=2, n_head=2, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(5)
    model = transformers.GPT2LMHeadModel(config)
    engine = sw.Engine(model, adamw(model), zero=3)
    x = torch.arange(40).view(4, 10)
    rows = world.share(x)
    engine.backward(model(rows, labels=rows, use_cache=False).loss)
    engine.step()
    path = engine.save(folder, split_gb=2e-5)
    assert (path / "model.safetensors.index.json").is_file()
    model.eval()
    with torch.no_grad():
        mine = model(x, use_cache=False).logits
    if world.is_main:
        theirs = transformers.AutoModelForCausalLM.from_pretrained(path).eval()
        with torch.no_grad():
            assert torch.equal(theirs(x).logits, mine)
    other = transformers.GPT2LMHeadModel(config)
    second = sw.Engine(other, adamw(other), zero=1)
    world.barrier()
    if world.is_main:
        (path / "checkpoint.json").unlink()  # now a folder in Hugging Face's layout
        shutil.copytree(path, folder / "hub", ignore=shutil.ignore_patterns("optimizer*"))
    world.barrier()
    with pytest.raises(BrokenCheckpoint, match=r"no checkpoint\.json.*model_only=True"):
        second.load(path)
    second.load(folder / "hub")
    with torch.no_grad():
        assert torch.equal(other.eval()(x, use_cache=False).logits, mine)
    for each in (engine, second):
        each.close()


def test_transformers_reads_it(group, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    group(2)(transformers_case, tmp_path, limit=120)


def foreign_case(world, folder, row):
    """Load files of other libraries, with and without wrappers. One error lists all mismatches."""
    theirs = Everything()
    wrapped = {f"module._orig_mod.{name}": value for name, value in theirs.state_dict().items()}
    if world.is_main:
        torch.save({"epoch": 3, "model": wrapped}, folder / "wrapped.pt")
        safetensors.torch.save_model(theirs, folder / "plain.safetensors")
    world.barrier()
    model = made()
    engine = engine_of(model, zero=row)
    for name in ("wrapped.pt", "plain.safetensors"):
        engine.load(folder / name)
        with engine.full_parameters():
            first = torch.tensor(sum(float(p.double().sum()) for p in model.parameters()))
        assert len(set(world.gather(float(first)))) == 1
    world.barrier()
    if world.is_main:
        wrapped["module._orig_mod.extra"] = torch.ones(2)
        wrapped["module._orig_mod.conv.bias"] = torch.ones(9)
        del wrapped["module._orig_mod.norm.bias"]
        torch.save(wrapped, folder / "other.pt")
        torch.save([wrapped, Everything], folder / "code.pt")
    world.barrier()
    with pytest.raises(
        CheckpointMismatch, match=r"conv\.bias \(model \[4\], file \[9\]\).*norm\.bias.*extra"
    ):
        engine.load(folder / "other.pt")
    with pytest.raises(CheckpointError, match="could run code"):
        engine.load(folder / "code.pt")
    world.barrier()
    with engine.full_parameters():
        before = model.norm.bias.detach().clone()
    wrapped = {"norm.weight": torch.full((6,), 3.0), "extra": torch.ones(1)}
    if world.is_main:
        torch.save(wrapped, folder / "some.pt")
    world.barrier()
    engine.load(folder / "some.pt", strict=False)
    with engine.full_parameters():
        assert torch.equal(model.norm.weight, torch.full((6,), 3.0))
        assert torch.equal(model.norm.bias, before)
    engine.close()


@pytest.mark.parametrize("row", [0, 3])
def test_files_of_others(group, tmp_path, row):
    group(2)(foreign_case, tmp_path, row)
