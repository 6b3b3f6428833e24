"""Weights published for inference have the trainer's bits, and no rank gathers them."""

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch

import shardwise as sw
from shardwise.checkpoint.formats.comparing import fingerprints
from shardwise.errors import CheckpointNotWritten, UsageError
from tests import foreign_checkpoints as foreign


def step(engine, model, world, number):
    share = foreign.ROWS // world.size
    x, y = foreign.batch(number, world.rank * share, (world.rank + 1) * share)
    engine.backward(foreign.loss_of(model, x, y))
    engine.step()


def full_state(engine, model, dtype=None):
    """Return a copy of the full model, in the dtype that is published."""
    with engine.full_parameters():
        return {n: v.detach().to(dtype or v.dtype).clone() for n, v in model.state_dict().items()}


def read(folder):
    """Read a folder with the stock library, with all names of tied weights."""
    found, aliases = {}, {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        found |= safetensors.torch.load_file(path)
        with safetensors.safe_open(path, "pt") as file:
            aliases |= file.metadata()
    return found | {alias: found[first] for alias, first in aliases.items() if first in found}


def folder_case(world, folder, row, dtype):
    """Publish, train, and publish again: the bits are those of the full model each time."""
    model = foreign.build()
    model.emb.weight.requires_grad = False  # tied to the head
    trained = [p for p in model.parameters() if p.requires_grad]
    engine = sw.Engine(model, torch.optim.AdamW(trained, lr=0.1), zero=row)
    paths = []
    for number in range(3):
        path = engine.publish(folder / "weights", dtype=dtype, keep=2)
        wanted = full_state(engine, model, dtype)
        found = read(path)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], value) for name, value in wanted.items())
        assert json.loads((path / "fingerprints.json").read_text()) == fingerprints(wanted)
        assert (folder / "weights" / "latest").resolve() == path.resolve()
        paths.append(path)
        world.barrier()
        step(engine, model, world, number)
    assert [path.exists() for path in paths] == [False, True, True]
    # Frozen weights are in a file that both versions share.
    linked = [[f.stat().st_ino for f in sorted(p.glob("*.safetensors"))] for p in paths[1:]]
    assert linked[0][0] == linked[1][0]
    assert linked[0][1] != linked[1][1]
    engine.close()


@pytest.mark.parametrize(
    ("size", "row", "dtype"),
    [
        (2, 3, torch.bfloat16),
        (2, 0, None),
        (3, 2, torch.float32),
        pytest.param(4, 3, None, marks=pytest.mark.full),
    ],
)
def test_published_folder_has_the_bits_of_the_model(group, tmp_path, size, row, dtype):
    group(size)(folder_case, tmp_path, row, dtype)


def callback_case(world, row):
    """Every element is sent once, and later only what has changed."""
    model = foreign.build()
    model.lin.weight.requires_grad = False
    trained = [p for p in model.parameters() if p.requires_grad]
    engine = sw.Engine(model, torch.optim.SGD(trained, lr=0.1), zero=row)
    parts = []

    def keep(part):
        parts.append((part.name, part.first, part.values.clone()))

    def publish():
        parts.clear()
        assert engine.publish(keep, dtype=torch.bfloat16) is None
        return [part for of_rank in world.gather(list(parts)) for part in of_rank]

    wanted = full_state(engine, model, torch.bfloat16)
    del wanted["head.weight"]
    found = {name: torch.full((value.numel(),), torch.nan) for name, value in wanted.items()}
    for name, first, values in publish():
        assert found[name][first : first + len(values)].isnan().all()
        found[name][first : first + len(values)] = values.float()
    for name, value in wanted.items():
        assert torch.equal(found[name], value.flatten().float())
    if row == 3:
        held = sum(len(values) for *_, values in parts)
        assert held < sum(value.numel() for value in wanted.values())
    assert publish() == []
    step(engine, model, world, 0)
    changed = {name for name, *_ in publish()}
    assert "lin.weight" not in changed
    assert "scale" not in changed
    assert "emb.weight" in changed

    # Another function may serve another receiver, which has received nothing yet.
    others = []
    engine.publish(lambda part: others.append(part.name), dtype=torch.bfloat16)
    assert "scale" in {name for names in world.gather(others) for name in names}

    def fail(part):
        raise KeyError(part.name)

    step(engine, model, world, 1)
    with pytest.raises(CheckpointNotWritten, match=r"callback of engine\.publish failed.*KeyError"):
        engine.publish(fail if world.rank else lambda part: None)
    with pytest.raises(UsageError, match="int8"):
        engine.publish("weights", dtype=torch.int8)
    with pytest.raises(UsageError, match="keep=0"):
        engine.publish("weights", keep=0)
    engine.close()


@pytest.mark.parametrize("row", [1, 3])
def test_callback_gets_every_element_once(group, row):
    group(2)(callback_case, row)


def failure_case(world, folder):
    """A disk that refuses a version leaves the earlier one, and no draft."""
    model = foreign.build()
    engine = sw.Engine(model, foreign.optimizer_of(model, "sgd"), zero=3)
    engine.publish(folder)
    step(engine, model, world, 0)
    if world.is_main:
        (folder / ".weights-1.partial").touch()
    world.barrier()
    with pytest.raises(CheckpointNotWritten, match="were not published"):
        engine.publish(folder)
    assert (folder / "latest").resolve().name == "weights-0"
    world.barrier()
    if world.is_main:
        (folder / ".weights-1.partial").unlink()
    world.barrier()
    assert engine.publish(folder).name == "weights-1"
    assert engine.publish(folder).name == "weights-1.1"
    engine.close()


def test_failed_publication_keeps_the_last_version(group, tmp_path):
    group(2)(failure_case, tmp_path)
