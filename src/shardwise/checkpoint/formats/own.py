"""Opens Shardwise's own checkpoints through the interface that all formats share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from shardwise.checkpoint import json_values
from shardwise.checkpoint.atomic_folders import DOCUMENT, complete
from shardwise.checkpoint.formats.safetensors_files import read_configs
from shardwise.checkpoint.formats.saved import (
    Checkpoint,
    Leaf,
    OptimizerGroup,
    SavedOptimizer,
    reading,
)
from shardwise.checkpoint.tools import OpenedCheckpoint


def open_checkpoint(path: Path) -> Checkpoint | None:
    """Open the checkpoint at `path`, or the newest one in `path`. Returns None if there is none."""
    if not path.is_dir() or not (os.path.lexists(path / DOCUMENT) or complete(path)):
        return None
    opened = OpenedCheckpoint(path)
    with ExitStack() as stack, reading(opened.path, "Shardwise"):
        stack.enter_context(opened)
        fields = opened.fields
        checkpoint = Checkpoint("Shardwise", opened.path, opened.sets["model"])
        checkpoint.optimizers = _optimizers(opened)
        checkpoint.step, checkpoint.seed = fields["step"], fields["seed"]
        scaling = fields["scaling"]
        checkpoint.scale = scaling["scale"], scaling["good_steps"]
        metadata = opened.sets["model"].metadata
        checkpoint.aliases = {a: f for a, f in metadata.items() if f in checkpoint.model.specs}
        if "average" in opened.sets:
            checkpoint.averages["average"] = opened.sets["average"]
        checkpoint.facts = {
            **{str(k): str(v) for k, v in fields["written_by"].items()},
            "seed": str(fields["seed"]),
            "tracked": ", ".join(sorted(fields["tracked"])) or "nothing",
        }
        if fields["tracked"]:
            checkpoint.notes.append(
                f"The tracked objects ({', '.join(sorted(fields['tracked']))}) stay in "
                f"{opened.path}: only engine.load restores them."
            )
        checkpoint.config = read_configs(opened.path)
        checkpoint.damages = lambda rank, size: _damages(opened, rank, size)
        checkpoint.stack = stack.pop_all()
    return checkpoint


def _optimizers(opened: OpenedCheckpoint) -> list[SavedOptimizer]:
    tensors = opened.sets.get("optimizer")
    state: dict[Any, dict[str, Any]] = {
        name: {key: json_values.decode(value) for key, value in entry.items()}
        for name, entry in opened.fields["state"].items()
    }
    for full in tensors.specs if tensors is not None else ():
        name, _, key = full.rpartition(".")
        assert tensors is not None
        state.setdefault(name, {})[key] = Leaf(tensors, full)
    found = []
    for described in opened.fields["optimizers"]:
        groups = [
            OptimizerGroup(
                group["parameters"],
                {key: json_values.decode(value) for key, value in group["options"].items()},
            )
            for group in described["groups"]
        ]
        own = [key for group in groups for key in group.keys]
        found.append(
            SavedOptimizer(groups, {k: state[k] for k in own if k in state}, described["class"])
        )
    return found


def _damages(opened: OpenedCheckpoint, rank: int, size: int) -> Iterator[str]:
    for number, line in enumerate(opened.lines()):
        if number % size == rank:
            tensors = opened.sets[line.kind]
            if tensors.checksum(line.spec.name) != line.checksum:
                yield (
                    f"{line.spec.name} in {opened.path / line.file} was changed after it was "
                    f"written: its CRC-32 is not {line.checksum}. Use another checkpoint."
                )
    if rank == 0:
        for name in opened.missing_tensors():
            yield f"{opened.path} lacks {name}. Use another checkpoint."
        for name in opened.changed_files():
            yield f"{opened.path / name} was changed after it was written. Use another checkpoint."
