"""save_state and load_state: the engines' checkpoints beside what Accelerate itself keeps.

output_dir/
├── step-100/                   weights and optimizer state, as engine.save writes them
├── shardwise.json              written last: which folders belong to it
├── random_states_0.pkl         of each rank
└── scheduler.bin, custom_checkpoint_0.pkl ...

With several engines each has a folder: engine_0/step-100, engine_1/step-500.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import shardwise as sw
from shardwise.bridging.trained_engine import Trained
from shardwise.checkpoint.file_system import replace_file
from shardwise.errors import BrokenCheckpoint, CheckpointError, CheckpointMismatch

MARK = "shardwise.json"


def save(engines: Sequence[sw.Engine], folder: Path, world: sw.World) -> None:
    """Save `engines` into `folder`; a save into the same folder before is replaced. Collective."""
    several = len(engines) > 1
    homes = [folder / f"engine_{number}" if several else folder for number in range(len(engines))]
    paths = []
    for engine, home in zip(engines, homes, strict=True):
        path = engine.save(home)
        engine.leave_folders()
        paths.append(path)
    if None in paths or world.settings.trial:
        return  # no room, which was said; or a trial, which leaves no trace
    if world.is_main:
        mark = {"engines": [os.path.relpath(str(p), folder) for p in paths]}
        replace_file(folder / MARK, json.dumps(mark, indent=1).encode())
        _remove_older(homes, paths)
    world.barrier()


def _remove_older(homes: Sequence[Path], kept: Sequence[Path | None]) -> None:
    """Remove what earlier saves have left in the same folder."""
    for home in homes:
        for path in home.glob("step-*"):
            if path not in kept and (path / "checkpoint.json").is_file():
                shutil.rmtree(path, ignore_errors=True)


def is_ours(folder: Path) -> bool:
    """Whether `save` has written into `folder`, to the end."""
    return (folder / MARK).is_file()


def load(
    trained: Sequence[Trained], folder: Path, world: sw.World, *, model_only: bool = False
) -> None:
    """Load what `save` has written, or what stock Accelerate has; `model_only`: the weights alone.
    Collective.

    Raises BrokenCheckpoint for a folder whose save was killed, CheckpointMismatch for one of
    another number of engines.
    """
    found = _read(folder) if world.is_main else None
    names = world.broadcast_object(found)
    if names is None:
        _load_stock(trained, folder, world)
        return
    if len(names) != len(trained):
        raise CheckpointMismatch(
            f"{folder} has {len(names)} engine(s), and this script has {len(trained)}: prepare the "
            "same models and optimizers, in the same order."
        )
    for each, name in zip(trained, names, strict=True):
        each.engine.load(folder / name, model_only=model_only)


def _read(folder: Path) -> list[str] | None:
    """The folders of the engines in `folder`; None where Accelerate itself has saved there."""
    if not is_ours(folder):
        return None
    names = json.loads((folder / MARK).read_text())["engines"]
    assert isinstance(names, list)
    return names


def _load_stock(trained: Sequence[Trained], folder: Path, world: sw.World) -> None:
    """Load the weights and optimizers that stock Accelerate has saved with torch or safetensors."""
    optimizers = 0
    for number, each in enumerate(trained):
        if len(each.models) > 1:
            raise CheckpointError(
                f"{folder} was saved by Accelerate itself, and an engine here has several models "
                "in one: load them before they are prepared."
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
    """The file of the `number`-th model or optimizer. Raises BrokenCheckpoint where there is
    none."""
    ending = f"_{number}" if number else ""
    for path in (folder / f"{safe}{ending}.safetensors", folder / f"{plain}{ending}.bin"):
        if path.is_file():
            return path
    raise BrokenCheckpoint(
        f"{folder} has neither {MARK} nor {plain}{ending}.bin: it is no checkpoint, or its save "
        "was killed before it was complete. Load another one."
    )


def copied(state: dict[str, Any]) -> dict[str, Any]:
    """`state` with memory of its own, in which tied weights are one tensor.

    Parameters are views of one buffer, which writers of safetensors would take for tied weights.
    """
    copies: dict[Any, Tensor] = {}
    found = {}
    for name, value in state.items():
        if isinstance(value, Tensor):
            place = value.data_ptr(), value.shape, value.stride()
            value = copies.setdefault(place if value.numel() else name, value.detach().clone())
        found[name] = value
    return found
