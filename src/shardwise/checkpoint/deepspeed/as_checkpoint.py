"""A save of DeepSpeed in the place of a checkpoint of ours: sets of tensors, and fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from shardwise.checkpoint.deepspeed import inert, optimizer
from shardwise.checkpoint.deepspeed.folders import LATEST, as_written, find
from shardwise.checkpoint.deepspeed.save import Save
from shardwise.checkpoint.reader import TensorReader
from shardwise.errors import BrokenCheckpoint, CheckpointError

SCHEDULER = "lr_scheduler"
"""The name under which the state of DeepSpeed's scheduler is tracked."""


def fields_of(
    save: Save, names: Mapping[str, Sequence[str]], groups: Sequence[Sequence[str]]
) -> tuple[dict[str, TensorReader], dict[str, Any]]:
    """The sets of tensors of `save`, and what checkpoint.json would say of it; the second is empty
    where no optimizer was saved.

    `names` are those of a model's tensors by the first, `groups` the first names of what its
    optimizer has, by group. Its seed is None: DeepSpeed has none. Raises CheckpointMismatch where
    the optimizer is of other groups.
    """
    with as_written(save.files.folder):
        return _fields(save, names, groups)


def _fields(
    save: Save, names: Mapping[str, Sequence[str]], groups: Sequence[Sequence[str]]
) -> tuple[dict[str, TensorReader], dict[str, Any]]:
    sets: dict[str, TensorReader] = {"model": save.model}
    saved = optimizer.read(save, names, groups)
    if saved is None:
        return sets, {}
    if saved.tensors.specs:
        sets["optimizer"] = saved.tensors
    scale, good_steps = save.loss_scale or (1.0, 0)
    return sets, {
        "step": save.steps,
        "seed": None,
        "optimizers": [saved.described()],
        "state": saved.state(),
        "borders": [],
        "scaling": {"scale": scale, "good_steps": good_steps, "unit": None, "wide": False},
        "tracked": {} if save.scheduler is None else {SCHEDULER: save.scheduler},
        "written_by": {"deepspeed": save.version, "workers": save.ranks},
    }


def verify(save: Save, rank: int, size: int) -> None:
    """Read what falls to `rank` of `size` of the files. Raises BrokenCheckpoint for one that is not
    as it was written."""
    for path in save.files.all[rank::size]:
        if (fault := inert.damage(path)) is not None:
            raise BrokenCheckpoint(f"{fault}. Take another checkpoint, or a fresh copy of this.")


def opened(path: str | PathLike[str]) -> Save:
    """The save of DeepSpeed that `path` is, or names. Raises CheckpointError for none."""
    folder = find(Path(path))
    if folder is None:
        raise CheckpointError(
            f"{path} holds no save of DeepSpeed: no *_model_states.pt, and no {LATEST} that names "
            "a folder with one."
        )
    return Save(folder)


def client_state(path: str | PathLike[str]) -> dict[str, Any]:
    """What was given to DeepSpeed's save_checkpoint as client_state, in the save that `path` is, or
    names. Objects of classes are records of their attributes. Raises CheckpointError for none."""
    return opened(path).client_state
