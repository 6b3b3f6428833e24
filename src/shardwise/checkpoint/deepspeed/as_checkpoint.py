"""Presents a DeepSpeed save as a Shardwise checkpoint: its tensor sets and fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.checkpoint import json_values, tensor_names
from shardwise.checkpoint.deepspeed.folders import LATEST, as_written, find
from shardwise.checkpoint.deepspeed.partitions import STAGE_3, FragmentReader, Partitions
from shardwise.checkpoint.deepspeed.save import Save
from shardwise.checkpoint.reader import TensorReader
from shardwise.errors import BrokenCheckpoint, CheckpointError, CheckpointMismatch

SCHEDULER = "lr_scheduler"
"""Name of the tracked object that holds the state of DeepSpeed's scheduler."""


def fields_of(
    save: Save, names: Mapping[str, Sequence[str]], groups: Sequence[Sequence[str]]
) -> tuple[dict[str, TensorReader], dict[str, Any]]:
    """Return the tensor sets of `save`, and the fields that its checkpoint.json would have.

    The fields are empty if no optimizer was saved. The seed is None, because DeepSpeed does not
    save it. Raises CheckpointMismatch if the saved parameter groups differ from `groups`.

    Args:
        names: All names of each of the model's tensors (several for tied weights), keyed by the
            first one.
        groups: First names of the parameters in each of the optimizer's parameter groups.
    """
    sets: dict[str, TensorReader] = {"model": save.model}
    with as_written(save.files.folder):
        saved = _read_optimizer(save, names, groups)
        if saved is None:
            return sets, {}
        if saved.tensors.specs:
            sets["optimizer"] = saved.tensors
        optimizers, state = [saved.to_fields()], saved.state()
    scale, good_steps = save.loss_scale or (1.0, 0)
    return sets, {
        "step": save.steps,
        "seed": None,
        "optimizers": optimizers,
        "state": state,
        # DeepSpeed always updates entire flat groups, so it never cuts segments.
        "borders": [],
        "scaling": {"scale": scale, "good_steps": good_steps, "unit": None, "wide": False},
        "tracked": {} if save.scheduler is None else {SCHEDULER: save.scheduler},
        "written_by": {"deepspeed": save.version, "workers": save.ranks},
    }


def opened(path: str | PathLike[str]) -> Save:
    """Return the DeepSpeed save at `path`. Raises CheckpointError if there is none."""
    folder = find(Path(path))
    if folder is None:
        raise CheckpointError(
            f"{path} is not a DeepSpeed checkpoint: it has no *_model_states.pt, and no {LATEST} "
            "that names a folder with one. Name the folder of a tag, or its parent."
        )
    return Save(folder)


def client_state(path: str | PathLike[str]) -> dict[str, Any]:
    """Return the `client_state` that was passed to DeepSpeed's save_checkpoint.

    Args:
        path: Folder of a tag, or a folder that contains several tags and a file `latest`.

    Returns:
        The saved values by key. An object of an unknown class becomes a plain record of its
        attributes. No code from the file runs.

    Raises:
        CheckpointError: `path` is not a DeepSpeed checkpoint.
        BrokenCheckpoint: A file is missing or damaged.

    Example::

        state = client_state("ckpt")
        epoch, lr = state["epoch"], state["args"].lr
    """
    return opened(path).client_state


# -- the optimizer ----------------------------------------------------------------------------

MASTER = "master"
"""Key of a parameter's fp32 master weights among the optimizer's tensors."""

_OWN_ADAM = "bias_correction"
"""Option that only DeepSpeed's own Adam classes have. They store the step count as an int."""

_OF_ELEMENTS = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "sum", "square_avg"}
"""Keys of torch's optimizer state that has the same shape as its parameter."""


@dataclass
class DeepSpeedOptimizer:
    """The optimizer in a DeepSpeed save.

    Args:
        tensors: State tensors, each named PARAMETER.KEY.
        groups: Names of the parameters in each parameter group.
        options: Options of each parameter group.
        numbers: Scalar state, by parameter name and key.
    """

    tensors: FragmentReader = field(default_factory=FragmentReader)
    groups: list[list[str]] = field(default_factory=list)
    options: list[dict[str, Any]] = field(default_factory=list)
    numbers: dict[str, dict[str, Any]] = field(default_factory=dict)

    def to_fields(self) -> dict[str, Any]:
        """Return the optimizer's entry for checkpoint.json, with "" as its (unknown) class."""
        return {
            "class": "",
            "groups": [
                {"parameters": names, "options": {k: _encode(v) for k, v in options.items()}}
                for names, options in zip(self.groups, self.options, strict=True)
            ],
        }

    def state(self) -> dict[str, dict[str, Any]]:
        """Return the scalar state in the form used in checkpoint.json."""
        return {n: {k: _encode(v) for k, v in e.items()} for n, e in self.numbers.items()}


def _read_optimizer(
    save: Save, names: Mapping[str, Sequence[str]], groups: Sequence[Sequence[str]]
) -> DeepSpeedOptimizer | None:
    """Return the optimizer in `save`, or None if no optimizer was saved.

    At stage 0, the state is stored without parameter names, so parameters are identified by their
    positions in the groups, as in torch's `load_state_dict`. Raises CheckpointMismatch if the saved
    groups differ from `groups`. See `fields_of` for the arguments.
    """
    optimizer = DeepSpeedOptimizer()
    if save.partitions is not None:
        # Match only parameters with optimizer state, so not buffers and frozen parameters.
        saved_names = {name for shapes in save.partitions.shapes for name in shapes}
        here = tensor_names.match(names, saved_names).found
        _read_flat(save, optimizer, save.partitions, {name: first for first, name in here.items()})
    elif save.optimizer is None:
        return None
    elif "fp32_groups_flat" in save.optimizer:
        shapes = [{name: save.shape_of(name, names) for name in group} for group in groups]
        flat = Partitions(save.files.folder, 0, {0: save.optimizer}, list(shapes))
        _read_flat(
            save, optimizer, flat, {name: name for group_shapes in shapes for name in group_shapes}
        )
    else:
        _read_by_place(save, optimizer, save.optimizer, names, groups)
    for options in optimizer.options:
        # torch's Adam always corrects bias and so does not have this option.
        if options.pop(_OWN_ADAM, True) is not True:
            raise CheckpointError(
                "The checkpoint has an Adam without bias correction, which torch does not have. "
                "Load only the model: engine.load(path, model_only=True)."
            )
    return optimizer


def _read_flat(
    save: Save, optimizer: DeepSpeedOptimizer, partitions: Partitions, here: Mapping[str, str]
) -> None:
    """Read optimizer state that is stored for flat groups of parameters.

    Args:
        here: Maps names in the files to names in the model.
    """
    bases = partitions.bases()
    for group in bases[0]["param_groups"]:
        members: list[str] = []
        for number in group["params"]:
            if not isinstance(number, int) or not 0 <= number < len(partitions.shapes):
                raise BrokenCheckpoint(
                    f"{save.files.folder} has an optimizer of flat group {number!r:.20}, but only "
                    f"{len(partitions.shapes)} groups. Use another checkpoint."
                )
            known = {n: here[n] for n in partitions.shapes[number] if n in here}
            # Skip parameters that the model does not have. `optimizer_fields.check` reports them.
            members += known.values()
            # At stage 3, the model's tensors are the fp32 masters. At other stages, the masters of
            # parameters in a different dtype are in the flat tensors.
            masters = {n: f"{own}.{MASTER}" for n, own in known.items() if save.is_narrow(n)}
            if masters and save.stage != STAGE_3:
                partitions.add(optimizer.tensors, number, partitions.flats(number), masters)
            for key, value in bases[0]["state"].get(number, {}).items():
                # A flat tensor holds one value per element of the partition. A 0-dim tensor is a
                # step count.
                if isinstance(value, Tensor) and value.ndim:
                    as_state = {n: f"{model_name}.{key}" for n, model_name in known.items()}
                    flats = partitions.state(number, key)
                    partitions.add(optimizer.tensors, number, flats, as_state)
                else:
                    for model_name in known.values():
                        optimizer.numbers.setdefault(model_name, {})[key] = _step_count(
                            key, value, group
                        )
        optimizer.groups.append(members)
        optimizer.options.append(_options(group))


def _read_by_place(
    save: Save,
    optimizer: DeepSpeedOptimizer,
    saved: Mapping[str, Any],
    names: Mapping[str, Sequence[str]],
    groups: Sequence[Sequence[str]],
) -> None:
    """Read a plain state_dict, which identifies parameters by position.

    With fp16, DeepSpeed stores the master weights in the state_dict's `fp32_groups`.
    """
    plain = saved.get("optimizer_state_dict", saved)
    counts = [len(group["params"]) for group in plain["param_groups"]]
    if counts != [len(group) for group in groups]:
        raise CheckpointMismatch(
            f"{save.files.folder} has optimizer groups of {counts} parameters, but here they have "
            f"{[len(group) for group in groups]}. Stage 0 stores no names, so the groups must be "
            "the same. Create the same groups, or load only the model: "
            "engine.load(path, model_only=True)."
        )
    masters = iter(saved.get("fp32_groups") or [[]] * len(counts))
    for group, members in zip(plain["param_groups"], groups, strict=True):
        for name, number in zip(members, group["params"], strict=True):
            for key, value in plain["state"].get(number, {}).items():
                _add_state(save, optimizer, name, key, _step_count(key, value, group), names)
        for name, value in zip(members, next(masters), strict=False):
            _add_state(save, optimizer, name, MASTER, value, names)
        optimizer.groups.append(list(members))
        optimizer.options.append(_options(group))


def _add_state(
    save: Save,
    optimizer: DeepSpeedOptimizer,
    name: str,
    key: str,
    value: Any,
    names: Mapping[str, Sequence[str]],
) -> None:
    if not isinstance(value, Tensor) or not value.ndim:
        optimizer.numbers.setdefault(name, {})[key] = value
        return
    shape = save.shape_of(name, names)
    if key in (*_OF_ELEMENTS, MASTER) and tuple(value.shape) != shape:
        raise CheckpointMismatch(
            f"{key} at the position of {name} in {save.files.folder} has the shape "
            f"{list(value.shape)}, but {name} has {list(shape)}. Stage 0 stores no names, and the "
            "parameters are in another order here. Create the groups as they were, or load only "
            "the model: engine.load(path, model_only=True)."
        )
    optimizer.tensors.add_whole(f"{name}.{key}", value)


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in group.items() if k not in ("params", "param_names", "step")}


def _step_count(key: str, value: Any, group: Mapping[str, Any]) -> Any:
    """Return `value` as a tensor if it is DeepSpeed Adam's step count, and unchanged otherwise.

    torch's optimizers store step counts as tensors.
    """
    if key == "step" and _OWN_ADAM in group and not isinstance(value, Tensor):
        return torch.tensor(float(value))
    return value


def _encode(value: Any) -> Any:
    try:
        return json_values.encode(value)
    except json_values.NotPlain as error:
        raise CheckpointError(
            f"The optimizer of this checkpoint contains {error}, which cannot be loaded. Load only "
            "the model: engine.load(path, model_only=True)."
        ) from error
