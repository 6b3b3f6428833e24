"""Opens the folders in which the Transformers Trainer and Accelerate save a run.

checkpoint-500/   model.safetensors  optimizer.pt   scheduler.pt   trainer_state.json    Trainer
state/            model.safetensors  optimizer.bin  scheduler.bin                     Accelerate
state/            pytorch_model_fsdp.bin or pytorch_model_fsdp_0/, optimizer_0/          FSDP
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from shardwise.checkpoint.file_system import read_whole
from shardwise.checkpoint.formats import dcp, safetensors_files, torch_files, training_dict
from shardwise.checkpoint.formats.saved import Checkpoint, reading
from shardwise.errors import BrokenCheckpoint

_OPTIMIZERS = ("optimizer.pt", "optimizer.bin")
_SCHEDULERS = ("scheduler.pt", "scheduler.bin")
_FSDP = "pytorch_model_fsdp"
_STATE = "trainer_state.json"


def has_optimizer(path: Path) -> bool:
    """Return whether the folder contains an optimizer's state under one of the usual names."""
    return (path / "optimizer_0").is_dir() or any((path / name).is_file() for name in _OPTIMIZERS)


def open_checkpoint(path: Path) -> Checkpoint | None:
    """Open the run folder `path`. Returns None if it is not one."""
    if not path.is_dir():
        return None
    fsdp = (path / f"{_FSDP}_0").is_dir() or (path / f"{_FSDP}.bin").is_file()
    if not has_optimizer(path) and not fsdp and not (path / _STATE).is_file():
        return None
    with ExitStack() as stack:
        checkpoint = _open_model(path, stack)
        if checkpoint is None:
            return None
        trainer = (path / _STATE).is_file()
        checkpoint.format = "Transformers Trainer" if trainer else "Accelerate"
        checkpoint.notes = []
        tree: dict[str, Any] = {}
        for name in _OPTIMIZERS:
            if (path / name).is_file():
                tree["optimizer"] = _load(path / name)
        if (path / "optimizer_0").is_dir():
            tree["optimizer"] = _load_sharded_optimizer(path / "optimizer_0", stack)
        for name in _SCHEDULERS:
            if (path / name).is_file():
                tree["lr_scheduler"] = _load(path / name)
        if (path / "scaler.pt").is_file():
            tree["scaler"] = _load(path / "scaler.pt")
        if trainer:
            tree["step"] = _step(path / _STATE)
        with reading(path, checkpoint.format):
            # Any state_dict will do: only what stands next to it is used.
            some = training_dict.leaves_of(checkpoint.model)
            found = training_dict.interpret({"model": some, **tree}, path)
        for name in ("optimizers", "step", "schedulers", "scale", "notes"):
            setattr(checkpoint, name, found.get(name, getattr(checkpoint, name)))
        damages = checkpoint.damages
        files = [path / n for n in (*_OPTIMIZERS, *_SCHEDULERS) if (path / n).is_file()]
        checkpoint.damages = lambda rank, size: (
            fault
            for faults in (damages(rank, size), torch_files.damages(files[rank::size]))
            for fault in faults
        )
        stack.push(checkpoint.stack.pop_all())
        checkpoint.stack = stack.pop_all()
        return checkpoint


def _open_model(path: Path, stack: ExitStack) -> Checkpoint | None:
    """Open the model in the run folder `path`. Returns None if it contains no model."""
    if (path / f"{_FSDP}.bin").is_file():
        return torch_files.open_checkpoint(path / f"{_FSDP}.bin")
    folder = path / f"{_FSDP}_0"
    if not folder.is_dir():
        return safetensors_files.open_folder(path)
    _check_sharded(folder)
    checkpoint = dcp.open_checkpoint(folder)
    assert checkpoint is not None
    stack.push(checkpoint.stack.pop_all())
    checkpoint.path = path
    return checkpoint


def _load(path: Path) -> Any:
    content, _ = torch_files.load(path)
    with reading(path, torch_files.WHAT):
        return torch_files.as_tree(content, path)[0]


def _load_sharded_optimizer(folder: Path, stack: ExitStack) -> Any:
    _check_sharded(folder)
    tree, _ = dcp.read_tree(folder, stack)
    return tree.get("optimizer", tree)


def _check_sharded(folder: Path) -> None:
    """Raise BrokenCheckpoint if `folder`, which a sharded save has created, is incomplete."""
    if dcp.find(folder) is None:
        raise BrokenCheckpoint(
            f"{folder} lacks {dcp.METADATA}: the save did not finish, or the file was not copied. "
            "Restore the file, or use another checkpoint."
        )


def _step(path: Path) -> int:
    """Return the number of updates that the Trainer has recorded."""
    try:
        step = json.loads(read_whole(path))["global_step"]
        if type(step) is int and step >= 0:
            return step
        reason = f"global_step is {step!r:.40}"
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"
    raise BrokenCheckpoint(
        f"{path} is not the state of a Transformers Trainer ({reason}). Restore the file, or load "
        "only the model."
    )
