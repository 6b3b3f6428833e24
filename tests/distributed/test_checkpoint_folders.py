"""Folders of a run that were edited, damaged, or are used by another job."""

import json
import subprocess
import sys

import pytest
import torch

import shardwise as sw
from shardwise.checkpoint import document, folder_lock
from shardwise.errors import BrokenCheckpoint, CheckpointError, FolderInUse
from tests.distributed.test_checkpoint import adamw, alike, engine_of, made, train, whole


def fresh(world, **settings):
    """Return another model and engine, with other values."""
    world.engines = 0
    torch.manual_seed(77)
    model = made()
    return model, engine_of(model, **settings)


def run_of(world, folder, steps=3):
    """Train and save at each step; return the values of all steps."""
    model, engine = fresh(world, zero=1)
    told = []
    for step in range(steps):
        train(world, engine, model, [step])
        engine.save(folder)
        told.append(whole(engine, model))
    engine.close()
    world.barrier()
    return told


def once(world, work):
    """Run `work` on one rank, between two barriers."""
    world.barrier()
    if world.is_main:
        work()
    world.barrier()


def edited_case(world, folder):
    values = run_of(world, folder)
    path = folder / "step-3" / "checkpoint.json"
    once(world, lambda: path.write_text(path.read_text().replace('"lr": 0.01', '"lr": 9.001')))
    model, engine = fresh(world, zero=3)
    lines = []
    world.print = lambda *words, **_: lines.append(" ".join(map(str, words)))
    try:
        assert engine.resume(folder) == 2
    finally:
        del world.print
    alike(whole(engine, model), values[1])
    assert "skipped a checkpoint" in lines[0]
    assert "step-3/checkpoint.json was changed after it was written" in lines[0]
    once(world, lambda: document.accept(folder / "step-3"))
    engine.load(folder / "step-3")
    assert engine.steps == 3
    assert engine._spec.optimizers[0].param_groups[0]["lr"] == 9.001
    engine.close()


@pytest.mark.parametrize("size", [1, 2])
def test_an_edited_checkpoint_is_skipped_until_it_is_accepted(group, tmp_path, size):
    group(size)(edited_case, tmp_path)


def kinds_case(world, folder, key, value):
    """Load values of a wrong type that only an update would notice.

    Nothing may change before the error.
    """
    run_of(world, folder, 1)

    def edit():
        path = folder / "step-1" / "checkpoint.json"
        told = json.loads(path.read_text())
        place = told["state"]["head.weight" if "head.weight" in told["state"] else "embed.weight"]
        (place if key == "step" else told["optimizers"][0]["groups"][0]["options"])[key] = value
        path.write_text(json.dumps(told))
        document.accept(folder / "step-1")

    once(world, edit)
    model, engine = fresh(world, zero=1)
    before = whole(engine, model)
    with pytest.raises(BrokenCheckpoint, match=f"^The {key} of|sets {key} of group 0 of AdamW to"):
        engine.resume(folder)
    alike(whole(engine, model), before)
    engine.close()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("step", "3"),
        ("lr", "0.1"),
        ("betas", {"$tuple": [0.9]}),
        ("betas", [1, [2]]),
        ("eps", [1]),
        ("amsgrad", "no"),
    ],
)
def test_values_of_another_kind(group, tmp_path, key, value):
    group(1)(kinds_case, tmp_path, key, value)


def lost_case(world, folder):
    values = run_of(world, folder)
    lines = []
    world.print = lambda *words, **_: lines.append(" ".join(map(str, words)))
    model, engine = fresh(world, zero=3)
    try:
        once(world, (folder / "step-3" / "checkpoint.json").unlink)
        assert engine.resume(folder) == 2
        said = f"shardwise: skipped a checkpoint: {folder}/step-3 is incomplete: it has no check"
        assert lines[0].startswith(said)
        alike(whole(engine, model), values[1])
        with pytest.raises(BrokenCheckpoint, match=r"tensors of a checkpoint.*model_only=True"):
            engine.load(folder / "step-3")
        engine.load(folder / "step-3", model_only=True)
        assert "step-3 has no checkpoint.json, so the checksums of its weights" in lines[-1]
        with pytest.raises(CheckpointError, match=r"is a single checkpoint.*engine\.load\("):
            engine.resume(folder / "step-2")
        for step in (1, 2):
            once(world, (folder / f"step-{step}" / "checkpoint.json").unlink)
        with pytest.raises(
            BrokenCheckpoint, match=r"step-3 is named like.*nor do 2 before it.*from scratch"
        ):
            engine.resume(folder)
        assert engine.steps == 2, "nothing was changed"
    finally:
        del world.print
        engine.close()


@pytest.mark.parametrize("size", [1, 2])
def test_a_checkpoint_without_its_document_is_reported(group, tmp_path, size):
    group(size)(lost_case, tmp_path)


HOLDER = """
import sys
import time
from pathlib import Path
from shardwise.checkpoint.folder_lock import take
held = take(Path(sys.argv[1]))
print("held", flush=True)
while not (held.folder / "go").exists():
    time.sleep(0.05)
"""


def shared_case(world, folder):
    """While another job saves there, resume and save do nothing; afterwards both work."""
    model, engine = fresh(world, zero=1)
    train(world, engine, model, range(1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folder_lock, "PATIENCE", 0.2)
        for call in (engine.resume, engine.save):
            with pytest.raises(FolderInUse, match=r"Another job saves into .*\(process \d+ on"):
                call(folder)
    once(world, lambda: (folder / "go").touch())
    path = engine.save(folder)
    values = whole(engine, model)
    engine.close()
    world.barrier()
    alike(loads_one(world, path), values)


def loads_one(world, path):
    model, engine = fresh(world, zero=2)
    engine.load(path)
    values = whole(engine, model)
    engine.close()
    return values


def test_two_jobs_in_one_folder(group, tmp_path):
    words = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        try:
            group(2)(shared_case, tmp_path)
        finally:
            other.kill()


def scheduled_run(world, folder, tracks):
    """Resume, train for a step and save. Return what was printed after the first step."""
    torch.manual_seed(77)
    model = made()
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    engine = sw.Engine(model, optimizer, bucket_mb=0.0005)
    engine.resume(folder)
    if tracks:
        engine.track(scheduler=scheduler)
    said = []
    world.say_once = said.append
    try:
        train(world, engine, model, [0, 1])
        lines = list(said)
        engine.save(folder)
    finally:
        del world.say_once
    engine.close()
    return lines


def forgotten_case(world, folder):
    assert not scheduled_run(world, folder, tracks=False)  # nothing was resumed
    (line,) = scheduled_run(world, folder, tracks=False)
    assert line.startswith("engine.resume did not restore all objects: a learning-rate scheduler")
    assert not scheduled_run(world, folder, tracks=True)


def test_a_scheduler_that_a_resume_did_not_restore_is_named(group, tmp_path):
    group(2)(forgotten_case, tmp_path)
