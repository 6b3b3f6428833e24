"""Faults while a checkpoint is written, their messages, and background saves."""

import errno
import os
import signal
import socket
import time
from pathlib import Path

import pytest
import torch

import shardwise as sw
from shardwise.checkpoint import background
from shardwise.checkpoint.folder_lock import LOCK
from shardwise.errors import (
    CheckpointError,
    CheckpointMismatch,
    CheckpointNotWritten,
    UsageError,
)
from tests.disk import failing
from tests.distributed.test_checkpoint import (
    STEPS,
    adamw,
    alike,
    engine_of,
    loads,
    made,
    train,
    whole,
)
from tests.distributed.test_engine import batch

FULL = r"^Rank 1: The checkpoint of step 2 was not written: No space left on device .* It needs "


def saved_in(folder):
    """Return the names in a run's folder, without the lock."""
    return sorted(set(os.listdir(folder)) - {LOCK})


def full_disk_case(world, folder):
    """One rank's disk is full: all ranks raise, and the previous checkpoint is intact."""
    model = made()
    engine = engine_of(model, zero=3)
    train(world, engine, model, range(1))
    engine.save(folder)
    train(world, engine, model, range(1, 2))
    with pytest.MonkeyPatch.context() as patch:
        if world.rank == 1:
            failing(patch, "pwrite", errno.ENOSPC)
        with pytest.raises(CheckpointNotWritten, match=FULL + r"[\d,]+ bytes, and [\d,]+ are free"):
            engine.save(folder)
    world.barrier()
    assert saved_in(folder) == ["step-1"], "the partial checkpoint wastes space"
    assert engine.resume(folder) == 1
    train(world, engine, model, range(1, 2))
    engine.save(folder, keep=1)
    engine.save(folder, keep=1)  # save the same step again
    world.barrier()
    assert saved_in(folder) == ["step-2"]
    engine.close()


def test_a_full_disk(group, tmp_path):
    group(2)(full_disk_case, tmp_path)


def tolerant_case(world, folder, background):
    """Over quota, read-only, or temporarily full: training continues without that checkpoint."""
    lines = []
    model = made()
    engine = engine_of(model, zero=2, save_failure="continue")
    world.print = lambda *values, **_: lines.append(" ".join(map(str, values)))
    try:
        for name, number in (("pwrite", errno.EDQUOT), ("mkdir", errno.EROFS)):
            train(world, engine, model, range(1))
            with pytest.MonkeyPatch.context() as patch:
                if world.rank == 1 or name == "mkdir":
                    failing(patch, name, number)
                path = engine.save(folder, background=background)
                assert (path is not None) == (background and name == "pwrite")
                engine._checkpoints.saver.wait()
    finally:
        del world.print
    train(world, engine, model, range(1))
    engine.save(folder, background=background)
    engine.close()
    world.barrier()
    assert saved_in(folder) == ["step-3"]
    return lines


@pytest.mark.parametrize("background", [False, True])
def test_training_continues_without_a_checkpoint(group, tmp_path, background):
    quota, read_only = group(2)(tolerant_case, tmp_path, background)[0]
    assert "Rank 1: The checkpoint of step 1 was not written: Disk quota exceeded" in quota
    assert "Rank 0: The checkpoint of step 2 was not written: Read-only file system" in read_only
    assert quota.endswith("are intact. Training continues.")


def silent_case(world, folder):
    """Leave no space even for a note: a full disk must not make the other ranks wait."""
    model = made()
    engine = engine_of(model, zero=3)
    train(world, engine, model, range(1))
    with pytest.MonkeyPatch.context() as patch:
        if world.rank == 1:
            failing(patch, "pwrite", errno.ENOSPC)
            patch.setattr(background, "_write_note", once_full(background._write_note))
        engine.save(folder, background=True)
        began = time.monotonic()
        engine._checkpoints.saver._job.join()
        assert time.monotonic() - began < 60
    with pytest.raises(CheckpointNotWritten, match=r"The checkpoint of step 1 was not written"):
        engine._checkpoints.saver.wait()
    engine.close()


def once_full(real):
    """Fail the first time, like a note that is larger than its reserved space."""
    calls = []

    def write(path, note):
        calls.append(path)
        if len(calls) == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(path, note)

    return write


def test_a_disk_too_full_for_notes(group, tmp_path):
    group(2)(silent_case, tmp_path)


class Plain(torch.nn.Sequential):
    """A model whose forward changes buffers and draws random numbers."""

    def __init__(self):
        super().__init__(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Dropout(0.5))


def asked_case(world, folder, asked_at):
    """Resume a loop without a Loader. One rank is asked to exit, and all ranks exit."""
    torch.manual_seed(3)
    model = Plain()
    engine = sw.Engine(model, adamw(model), zero=2)
    engine.resume(folder)
    rows = torch.arange(24.0).view(6, 4).sin()
    try:
        for step in range(engine.steps, 4):
            if world.rank == 1 and step == asked_at:
                world.preemption.asked = signal.SIGUSR1
            engine.backward(model(rows[step % 3 + world.rank :][:3]).square().mean())
            engine.step()
        return {name: value.clone() for name, value in model.state_dict().items()}
    except SystemExit as error:
        return error.code, engine.steps, saved_in(folder)
    finally:
        world.preemption.asked = world.preemption.agreed = 0
        world.preemption.forget()
        world.preemption._savers.clear()
        engine.close()


def test_all_leave_when_one_is_asked(group, tmp_path):
    """The forward before the end has no effect."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    wanted, _ = group(2)(asked_case, tmp_path / "a", None)
    assert group(2)(asked_case, tmp_path / "b", 1) == [(75, 2, ["step-2"])] * 2
    found, _ = group(2)(asked_case, tmp_path / "b", None)
    alike(found, wanted)


def blind_case(world, folder):
    """Ranks without a shared file system get a message with the hosts."""
    engine = engine_of(made(), zero=3)
    real = Path.is_dir
    with pytest.MonkeyPatch.context() as patch:
        if world.rank == 1:
            patch.setattr(Path, "is_dir", lambda p: not p.name.endswith(".partial") and real(p))
            patch.setattr(socket, "gethostname", lambda: "far")
        with pytest.raises(CheckpointError, match=r"not a shared folder: far cannot"):
            engine.save(folder)
    engine.close()
    assert saved_in(folder) == []


def test_hosts_without_a_common_folder(group, tmp_path):
    group(2)(blind_case, tmp_path)


def background_case(world, folder, row):
    """The save has the state of its moment, while training continues."""
    model = made()
    engine = engine_of(model, zero=row)
    train(world, engine, model, range(STEPS))
    values = whole(engine, model)
    path = engine.save(folder, background=True)
    train(world, engine, model, range(STEPS, STEPS + 2))
    engine.save(folder, background=True)
    engine.close()
    world.barrier()
    alike(loads(world, path, zero=1), values)
    assert not [name for name in os.listdir(path) if name.endswith(".note")]


@pytest.mark.parametrize("row", [0, 3])
def test_in_the_background(group, tmp_path, row):
    group(2)(background_case, tmp_path, row)


def background_failure_case(world, folder):
    model = made()
    engine = engine_of(model, zero=1)
    train(world, engine, model, range(1))
    with pytest.MonkeyPatch.context() as patch:
        if world.rank == 1:
            failing(patch, "pwrite", 28)
        engine.save(folder, background=True)
        if world.rank == 1:  # other ranks learn of it in the next step
            engine._checkpoints.saver._job.join()
    with pytest.raises(
        CheckpointNotWritten, match=r"The checkpoint of step 1 was not written: No space"
    ):
        train(world, engine, model, range(1, 2))
    assert not list(Path(folder).glob(".step-1.partial/*.safetensors")), "it takes up room"
    world.barrier()
    engine.save(folder)
    assert engine.resume(folder) == 2, "the step was made"
    engine.close()


def test_a_failure_in_the_background_is_reported(group, tmp_path):
    group(2)(background_failure_case, tmp_path)


def said_case(world, folder):
    model = made()
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    engine = sw.Engine(model, optimizer, zero=1)
    loader = sw.Loader([row for n in range(5) for row in batch(n).float()], 8)
    lines = []
    world.print = lambda *values, **_: lines.append(" ".join(map(str, values)))
    try:
        for x in loader:
            engine.backward(model(x, 0))
            with pytest.raises(UsageError, match=r"engine\.save between"):
                engine.save(folder)
            engine.step()
            scheduler.step()
            engine.save(folder)
            break
    finally:
        del world.print
    with pytest.raises(UsageError, match="state_dict"):
        engine.track(model=3)
    engine.track(loader=loader)
    with pytest.raises(CheckpointMismatch, match="no state of loader"):
        engine.resume(folder)
    engine.close()
    return lines


class Own:
    """A user's object whose state has tensors, or values that only code could restore."""

    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return {"own": self.state}

    def load_state_dict(self, state):
        self.state = state["own"]


def tracked_case(world, folder):
    model = made()
    engine = engine_of(model, zero=1)
    engine.track(large=Own(torch.arange(100.0)), small=Own((1, {2: 0.5})))
    train(world, engine, model, range(1))
    path = engine.save(folder)
    assert (path / "tracked-large.pt").is_file()
    engine.track(odd=Own(Own(3)))
    with pytest.raises(CheckpointError, match=r"state of odd .*could run code"):
        engine.save(folder)
    engine.close()
    engine = engine_of(made(), zero=0)
    engine.load(path)
    large, small = Own(None), Own(None)
    engine.track(large=large, small=small)  # after the load: the states are kept until now
    assert torch.equal(large.state, torch.arange(100.0))
    assert small.state == (1, {2: 0.5})
    engine.close()


def test_objects_of_the_user(group, tmp_path):
    group(2)(tracked_case, tmp_path)


def test_untracked_objects_are_reported(group, tmp_path):
    lines = "\n".join(group(2)(said_case, tmp_path)[0])
    assert "engine.track(scheduler=scheduler)" in lines
    assert "engine.track(loader=loader)" in lines
