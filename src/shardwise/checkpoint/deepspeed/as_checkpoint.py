"""Presents a save of DeepSpeed as a checkpoint of ours: sets of tensors, and fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.checkpoint import json_values, tensor_names
from shardwise.checkpoint.deepspeed import inert
from shardwise.checkpoint.deepspeed.folders import LATEST, as_written, find
from shardwise.checkpoint.deepspeed.partitions import STAGE_3, FragmentReader, Partitions
from shardwise.checkpoint.deepspeed.save import Save
from shardwise.checkpoint.reader import TensorReader
from shardwise.errors import BrokenCheckpoint, CheckpointError, CheckpointMismatch

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
    sets: dict[str, TensorReader] = {"model": save.model}
    with as_written(save.files.folder):
        saved = _read_optimizer(save, names, groups)
        if saved is None:
            return sets, {}
        if saved.tensors.specs:
            sets["optimizer"] = saved.tensors
        optimizers, state = [saved.described()], saved.state()
    scale, good_steps = save.loss_scale or (1.0, 0)
    return sets, {
        "step": save.steps,
        "seed": None,
        "optimizers": optimizers,
        "state": state,
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


# -- the optimizer ----------------------------------------------------------------------------

MASTER = "master"
"""The key of an fp32 master among the optimizer's tensors."""

_OWN_ADAM = "bias_correction"
"""An option that only DeepSpeed's own Adams have, which count steps as a plain number."""

_OF_ELEMENTS = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "sum", "square_avg"}
"""State that has the shape of its parameter, in optimizers of torch."""


@dataclass
class SavedOptimizer:
    """`tensors` as NAME.KEY; by group the names of its parameters, and its options; `numbers` by
    name what is one value each."""

    tensors: FragmentReader = field(default_factory=FragmentReader)
    groups: list[list[str]] = field(default_factory=list)
    options: list[dict[str, Any]] = field(default_factory=list)
    numbers: dict[str, dict[str, Any]] = field(default_factory=dict)

    def described(self) -> dict[str, Any]:
        """It in the form of checkpoint.json; its class is not said."""
        return {
            "class": "",
            "groups": [
                {"parameters": names, "options": {k: _plain(v) for k, v in options.items()}}
                for names, options in zip(self.groups, self.options, strict=True)
            ],
        }

    def state(self) -> dict[str, dict[str, Any]]:
        """What is one value each, in the form of checkpoint.json."""
        return {n: {k: _plain(v) for k, v in e.items()} for n, e in self.numbers.items()}


def _read_optimizer(
    save: Save, names: Mapping[str, Sequence[str]], groups: Sequence[Sequence[str]]
) -> SavedOptimizer | None:
    """The optimizer of `save` for a model with `names` (all of each tensor's, by the first), whose
    optimizer has `groups` of them. None where none was saved.

    Stage 0 names no parameters: they go by their place in the groups, as with torch's
    load_state_dict. Raises CheckpointMismatch where these are others.
    """
    found = SavedOptimizer()
    if save.partitions is not None:
        theirs = {name for shapes in save.partitions.shapes for name in shapes}
        here = tensor_names.match(names, theirs).found
        _read_flat(save, found, save.partitions, {name: first for first, name in here.items()})
    elif save.optimizer is None:
        return None
    elif "fp32_groups_flat" in save.optimizer:
        shapes = [{name: save.shape_of(name, names) for name in group} for group in groups]
        flat = Partitions(save.files.folder, 0, {0: save.optimizer}, list(shapes))
        _read_flat(save, found, flat, {name: name for each in shapes for name in each})
    else:
        _read_by_place(save, found, save.optimizer, names, groups)
    for options in found.options:
        # torch's Adam lacks the option that only DeepSpeed's own have.
        if options.pop(_OWN_ADAM, True) is not True:
            raise CheckpointError(
                "The checkpoint is of an Adam without bias correction, which torch's has not. Load "
                "the model alone: engine.load(path, model_only=True)."
            )
    return found


def _read_flat(
    save: Save, found: SavedOptimizer, partitions: Partitions, here: Mapping[str, str]
) -> None:
    """Read state over flat groups; `here` has a model's names by those in the files."""
    bases = partitions.bases()
    for group in bases[0]["param_groups"]:
        members: list[str] = []
        for number in group["params"]:
            if not isinstance(number, int) or not 0 <= number < len(partitions.shapes):
                raise BrokenCheckpoint(
                    f"{save.files.folder} has an optimizer over flat group {number!r:.20}, of "
                    f"{len(partitions.shapes)}. Take another checkpoint."
                )
            known = {n: here[n] for n in partitions.shapes[number] if n in here}
            members += known.values()
            _read_masters(save, found, partitions, number, known)
            for key, value in bases[0]["state"].get(number, {}).items():
                if isinstance(value, Tensor) and value.ndim:
                    as_state = {n: f"{ours}.{key}" for n, ours in known.items()}
                    flats = partitions.state(number, key)
                    partitions.add(found.tensors, number, flats, as_state)
                else:
                    for ours in known.values():
                        found.numbers.setdefault(ours, {})[key] = _count(key, value, group)
        found.groups.append(members)
        found.options.append(_options(group))


def _read_masters(
    save: Save,
    found: SavedOptimizer,
    partitions: Partitions,
    number: int,
    known: Mapping[str, str],
) -> None:
    """Read fp32 masters, where the model was trained in another dtype."""
    if save.stage != STAGE_3:  # where the model itself is made of them
        narrow = {n: f"{ours}.{MASTER}" for n, ours in known.items() if save.is_narrow(n)}
        if narrow:
            partitions.add(found.tensors, number, partitions.flats(number), narrow)


def _read_by_place(
    save: Save,
    found: SavedOptimizer,
    saved: Mapping[str, Any],
    names: Mapping[str, Sequence[str]],
    groups: Sequence[Sequence[str]],
) -> None:
    """Read a plain state_dict; that of fp16 has `fp32_groups` beside, the masters."""
    plain = saved.get("optimizer_state_dict", saved)
    counts = [len(group["params"]) for group in plain["param_groups"]]
    if counts != [len(group) for group in groups]:
        raise CheckpointMismatch(
            f"{save.files.folder} has an optimizer of groups of {counts} parameters, and here they "
            f"are {[len(group) for group in groups]}. Stage 0 names none of them: make the same "
            "groups, or load the model alone: engine.load(path, model_only=True)."
        )
    masters = iter(saved.get("fp32_groups") or [[]] * len(counts))
    for group, members in zip(plain["param_groups"], groups, strict=True):
        for name, number in zip(members, group["params"], strict=True):
            for key, value in plain["state"].get(number, {}).items():
                _take(save, found, name, key, _count(key, value, group), names)
        for name, value in zip(members, next(masters), strict=False):
            _take(save, found, name, MASTER, value, names)
        found.groups.append(list(members))
        found.options.append(_options(group))


def _take(
    save: Save,
    found: SavedOptimizer,
    name: str,
    key: str,
    value: Any,
    names: Mapping[str, Sequence[str]],
) -> None:
    if not isinstance(value, Tensor) or not value.ndim:
        found.numbers.setdefault(name, {})[key] = value
        return
    shape = save.shape_of(name, names)
    if key in (*_OF_ELEMENTS, MASTER) and tuple(value.shape) != shape:
        raise CheckpointMismatch(
            f"The {key} that {save.files.folder} has in the place of {name} has the shape "
            f"{list(value.shape)}, and {name} {list(shape)}: stage 0 names no parameters, and here "
            "they are in another order. Make the groups as they were, or load the model alone: "
            "engine.load(path, model_only=True)."
        )
    found.tensors.add_whole(f"{name}.{key}", value)


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in group.items() if k not in ("params", "param_names", "step")}


def _count(key: str, value: Any, group: Mapping[str, Any]) -> Any:
    """A count of steps as torch's optimizers keep it."""
    if key == "step" and _OWN_ADAM in group and not isinstance(value, Tensor):
        return torch.tensor(float(value))
    return value


def _plain(value: Any) -> Any:
    try:
        return json_values.encode(value)
    except json_values.NotPlain as error:
        raise CheckpointError(
            f"The optimizer of this save keeps {error}, which is not read here. Load the model "
            "alone: engine.load(path, model_only=True)."
        ) from error
