"""Implements save_state and load_state: the engines' checkpoints next to Accelerate's own files.

output_dir/
├── step-100/                   weights and optimizer state, as engine.save writes them
├── shardwise.json              the folders that belong to this save; written last
├── random_states_0.pkl         one per rank
└── scheduler.bin, custom_checkpoint_0.pkl ...

With several engines, each has its own folder: engine_0/step-100, engine_1/step-500.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch

import shardwise as sw
from shardwise.bridging.trained_engine import TrainedEngine
from shardwise.bridging.written_files import write
from shardwise.errors import BrokenCheckpoint, CheckpointError, CheckpointMismatch

MARK = "shardwise.json"


def save(engines: Sequence[sw.Engine], folder: Path, world: sw.World) -> None:
    """Save `engines` into `folder`, replacing an earlier save there. Collective."""
    several = len(engines) > 1
    homes = [folder / f"engine_{number}" if several else folder for number in range(len(engines))]
    paths = []
    for engine, home in zip(engines, homes, strict=True):
        path = engine.save(home)
        engine.leave_folders()
        paths.append(path)
    if None in paths or world.settings.trial:
        return  # the disk is full, which the engine reported; or a trial, which writes no files
    if world.is_main:
        fields = {"engines": [os.path.relpath(str(p), folder) for p in paths]}
        write(folder / MARK, json.dumps(fields, indent=1).encode())
        # Delete old folders only after writing the mark. If this save is killed before it, the
        # earlier one is still complete.
        for path in (path for home in homes for path in home.glob("step-*")):
            if path not in paths and (path / "checkpoint.json").is_file():
                shutil.rmtree(path, ignore_errors=True)
    world.barrier()


def is_ours(folder: Path) -> bool:
    """Return whether `folder` contains a complete checkpoint written by `save`."""
    return (folder / MARK).is_file()


def load(
    trained: Sequence[TrainedEngine], folder: Path, world: sw.World, *, model_only: bool = False
) -> None:
    """Load a checkpoint written by `save` or by stock Accelerate. Collective.

    If `model_only` is true, only the weights are loaded. Raises BrokenCheckpoint if the process was
    killed before the save was complete, and CheckpointMismatch if the checkpoint has a different
    number of engines.
    """
    names = None  # the engines' folders; None if stock Accelerate wrote this save
    if world.is_main and is_ours(folder):
        names = json.loads((folder / MARK).read_text())["engines"]
    names = world.broadcast_object(names)
    if names is None:
        _load_stock(trained, folder, world)
        return
    if len(names) != len(trained):
        raise CheckpointMismatch(
            f"{folder} has {len(names)} engine(s), but this script has {len(trained)}. Prepare the "
            "same models and optimizers, in the same order."
        )
    for each, name in zip(trained, names, strict=True):
        each.engine.load(folder / name, model_only=model_only)


def _load_stock(trained: Sequence[TrainedEngine], folder: Path, world: sw.World) -> None:
    """Load weights and optimizer states that stock Accelerate saved with torch or safetensors."""
    optimizers = 0
    for number, each in enumerate(trained):
        if len(each.models) > 1:
            raise CheckpointError(
                f"{folder} was saved by stock Accelerate, and an engine of this script has "
                "several models. Load their weights before accelerator.prepare()."
            )
        each.engine.load(_first(folder, "model", "pytorch_model", number), model_only=True)
        for optimizer in each.optimizers:
            state = None
            if world.is_main:
                path = _first(folder, "optimizer", "optimizer", optimizers)
                state = torch.load(path, map_location="cpu", weights_only=True)
            each.engine.load_optimizer_state_dict(state, optimizer)
            optimizers += 1


def _first(folder: Path, safe: str, plain: str, number: int) -> Path:
    """Return the file of model or optimizer `number`. Raises BrokenCheckpoint if there is none."""
    ending = f"_{number}" if number else ""
    for path in (folder / f"{safe}{ending}.safetensors", folder / f"{plain}{ending}.bin"):
        if path.is_file():
            return path
    raise BrokenCheckpoint(
        f"{folder} has neither {MARK} nor {plain}{ending}.bin: either it is not a checkpoint, or "
        "its save was killed before it was complete. Load another one."
    )
