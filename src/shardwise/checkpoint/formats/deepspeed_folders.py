"""Opens DeepSpeed checkpoints through the interface that all formats share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shardwise.checkpoint import json_values
from shardwise.checkpoint.deepspeed import inert
from shardwise.checkpoint.deepspeed.as_checkpoint import fields_of
from shardwise.checkpoint.deepspeed.folders import find
from shardwise.checkpoint.deepspeed.save import Save
from shardwise.checkpoint.formats.saved import (
    Checkpoint,
    Groups,
    Leaf,
    Names,
    OptimizerGroup,
    SavedOptimizer,
    SetsAndFields,
)
from shardwise.errors import CheckpointError


def open_checkpoint(path: Path) -> Checkpoint | None:
    """Open the DeepSpeed checkpoint at `path`. Returns None if there is none."""
    folder = find(path)
    if folder is None:
        return None
    save = Save(folder)
    checkpoint = Checkpoint("DeepSpeed", folder, save.model, step=save.steps)
    checkpoint.aliases = save.twins
    checkpoint.scale = save.loss_scale
    checkpoint.facts = {
        "written by": f"DeepSpeed {save.version}",
        "ZeRO stage": str(save.stage),
        "ranks": str(save.ranks),
        "client_state": ", ".join(map(str, save.client_state)) or "nothing",
    }
    checkpoint.damages = lambda rank, size: (
        f"{fault}. Use another checkpoint, or a fresh copy of this file."
        for file in save.files.all[rank::size]
        if (fault := inert.damage(file)) is not None
    )
    names = {name: [name] for name in save.model.specs if name not in save.twins}
    for alias, first in save.twins.items():
        names[first].append(alias)
    try:
        # At stages 1 to 3 the optimizer's state has names.
        sets, fields = fields_of(save, names, [])
        checkpoint.optimizers = _optimizers(sets, fields) if fields else []
    except CheckpointError as error:
        # For example, stage 0 stores positions, which only an engine can resolve. Weights can
        # be loaded regardless.
        checkpoint.notes.append(f"Its optimizer state cannot be read without a model: {error}")

    def resolve(names: Names, groups: Groups) -> SetsAndFields:
        checkpoint.notes.clear()  # with a model, the optimizer state can be read
        return fields_of(save, names, [group for optimizer in groups for group in optimizer])

    checkpoint.resolve = resolve
    return checkpoint


def _optimizers(sets: Any, fields: Any) -> list[SavedOptimizer]:
    state: dict[Any, dict[str, Any]] = {
        name: {key: json_values.decode(value) for key, value in entry.items()}
        for name, entry in fields["state"].items()
    }
    for full in sets["optimizer"].specs if "optimizer" in sets else ():
        name, _, key = full.rpartition(".")
        state.setdefault(name, {})[key] = Leaf(sets["optimizer"], full)
    return [
        SavedOptimizer(
            [
                OptimizerGroup(
                    group["parameters"],
                    {key: json_values.decode(value) for key, value in group["options"].items()},
                )
                for group in described["groups"]
            ],
            state,
        )
        for described in fields["optimizers"]
    ]
