"""Assigns saved optimizer state to a model's parameters, in the form of checkpoint.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.checkpoint import json_values, tensor_names
from shardwise.checkpoint.formats.saved import (
    Checkpoint,
    Groups,
    Leaf,
    MappedReader,
    Names,
    OptimizerGroup,
    SavedOptimizer,
    SetsAndFields,
    as_number,
)
from shardwise.checkpoint.formats.training_dict import Unread
from shardwise.checkpoint.reader import TensorReader
from shardwise.errors import CheckpointError, CheckpointMismatch
from shardwise.messages.printable import many

OF_ELEMENTS = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "sum", "square_avg"}
"""Keys of torch's optimizer state that has the same shape as its parameter."""

_OF_TORCH = "foreach"
"""Option that all torch optimizers have. They store step counts as tensors."""

_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
"""Last name parts of the buffers in torch's own modules."""

ONLY_MODEL = "Load only the model: engine.load(path, model_only=True)."


def fields_for(
    checkpoint: Checkpoint,
    names: Names,
    groups: Groups,
) -> SetsAndFields:
    """Return a checkpoint's tensor sets and checkpoint.json fields, under a model's names.

    The fields are empty if the checkpoint has no optimizer.

    Args:
        names: All names of each of the model's tensors, keyed by the first one.
        groups: For each optimizer and parameter group, the first names of its parameters.

    Raises:
        CheckpointMismatch: The saved optimizers have different parameters or groups.
    """
    if checkpoint.resolve is not None:
        return checkpoint.resolve(names, groups)
    if not checkpoint.optimizers:
        return {"model": checkpoint.model}, {}
    if len(checkpoint.optimizers) != len(groups):
        raise CheckpointMismatch(
            f"{checkpoint.path} has {many(len(checkpoint.optimizers), 'optimizer')}, but this "
            f"engine has {len(groups)}. Build the same ones, or load only the model: "
            "engine.load(path, model_only=True)."
        )
    specs = checkpoint.model.specs
    present = tensor_names.match(names, specs).found
    shapes = {first: specs[name].shape for first, name in present.items()}
    named = [
        _by_position(checkpoint, optimizer, own, shapes)
        if optimizer.is_by_position
        else _by_name(checkpoint, optimizer, own, names)
        for optimizer, own in zip(checkpoint.optimizers, groups, strict=True)
    ]
    return fields_of(checkpoint, named)


def fields_alone(
    checkpoint: Checkpoint,
) -> SetsAndFields:
    """Return a checkpoint's tensor sets and checkpoint.json fields, under the checkpoint's names.

    Raises CheckpointError if the checkpoint identifies parameters by position, and the positions do
    not determine the names.
    """
    if not checkpoint.optimizers:
        return {"model": checkpoint.model}, {}
    named = [_require_names(checkpoint, one) for one in checkpoint.optimizers]
    return fields_of(checkpoint, named)


def fields_of(checkpoint: Checkpoint, named: Sequence[SavedOptimizer]) -> SetsAndFields:
    """Return the tensor sets and checkpoint.json fields for the optimizers in `named`.

    Their parameters must already have names.
    """
    leaves: dict[str, Leaf] = {}
    numbers: dict[str, dict[str, Any]] = {}
    for optimizer in named:
        options = {key: group.options for group in optimizer.groups for key in group.keys}
        for name, entry in optimizer.state.items():
            for key, value in entry.items():
                if isinstance(value, Unread):
                    raise CheckpointError(
                        f"{checkpoint.path} has {key} of {name} in a form that cannot be read "
                        f"without running code. {ONLY_MODEL}"
                    )
                if "." in key:
                    raise CheckpointError(
                        f"{checkpoint.path} has optimizer state {key!r:.60} of {name}, which is "
                        f"nested. {ONLY_MODEL}"
                    )
                if isinstance(value, Leaf) and value.shape:
                    leaves[f"{name}.{key}"] = value
                    continue
                value = value.value() if isinstance(value, Leaf) else value
                of_torch = _OF_TORCH in options.get(name, {})
                if key == "step" and of_torch and not isinstance(value, Tensor):
                    value = torch.tensor(float(value))
                numbers.setdefault(name, {})[key] = _encode(checkpoint, value)
    sets: dict[str, TensorReader] = {"model": checkpoint.model}
    if leaves:
        sets["optimizer"] = MappedReader(leaves)
    fields: dict[str, Any] = {
        "step": _step(checkpoint, named),
        "seed": None,
        "optimizers": [
            {
                "class": optimizer.kind,
                "groups": [
                    {
                        "parameters": list(group.keys),
                        "options": {k: _encode(checkpoint, v) for k, v in group.options.items()},
                    }
                    for group in optimizer.groups
                ],
            }
            for optimizer in named
        ],
        "state": numbers,
        # Other libraries never cut the state of a parameter.
        "borders": [],
        "tracked": {k: json_values.encode(v) for k, v in checkpoint.schedulers.items()},
        "written_by": {"format": checkpoint.format, **checkpoint.facts},
    }
    if checkpoint.scale is not None:
        scale, steps = checkpoint.scale
        fields["scaling"] = {"scale": scale, "good_steps": steps, "unit": None, "wide": False}
    return sets, fields


def _step(checkpoint: Checkpoint, named: Sequence[SavedOptimizer]) -> int:
    """Return the checkpoint's number of updates, or the optimizers' step count if it lacks one."""
    if checkpoint.step is not None:
        return checkpoint.step
    counts = [
        as_number(entry["step"]) for one in named for entry in one.state.values() if "step" in entry
    ]
    step = int(max(counts, default=0))
    source = "its optimizers count" if counts else "so it counts as"
    checkpoint.notes.append(f"{checkpoint.path} has no step count; {source} {step} updates.")
    return step


def _encode(checkpoint: Checkpoint, value: Any) -> Any:
    try:
        return json_values.encode(value)
    except json_values.NotPlain as error:
        raise CheckpointError(
            f"{checkpoint.path} has an optimizer with {error}, which cannot be loaded. {ONLY_MODEL}"
        ) from error


# -- names of parameters -----------------------------------------------------------------------


def _by_position(
    checkpoint: Checkpoint,
    optimizer: SavedOptimizer,
    groups: Sequence[Sequence[str]],
    shapes: Mapping[str, tuple[int, ...]],
) -> SavedOptimizer:
    """Name the parameters by their positions in the groups, as torch's load_state_dict does."""
    counts = [len(group.keys) for group in optimizer.groups]
    if counts != [len(group) for group in groups]:
        raise CheckpointMismatch(
            f"{checkpoint.path} has optimizer groups of {counts} parameters, but here they have "
            f"{[len(group) for group in groups]}. It stores positions instead of names, so the "
            f"groups must be the same. Create the same groups, or load only the model: "
            "engine.load(path, model_only=True)."
        )
    to_name = {
        key: name
        for group, own in zip(optimizer.groups, groups, strict=True)
        for key, name in zip(group.keys, own, strict=True)
    }
    for key, entry in optimizer.state.items():
        if key not in to_name:
            raise CheckpointMismatch(
                f"{checkpoint.path} has optimizer state at the position {key!r:.20}, which no "
                f"group has. {ONLY_MODEL}"
            )
        for kind, value in entry.items():
            wanted = shapes.get(to_name[key])
            if kind in OF_ELEMENTS and isinstance(value, Leaf) and value.shape != wanted:
                raise CheckpointMismatch(
                    f"{kind} at the position of {to_name[key]} in {checkpoint.path} has the shape "
                    f"{list(value.shape)}, but the parameter has {list(wanted or ())}. The file "
                    "stores positions instead of names, and the parameters are in another order "
                    "here. Create the groups as they were, or load only the model: "
                    "engine.load(path, model_only=True)."
                )
    return SavedOptimizer(
        [
            OptimizerGroup(list(own), group.options)
            for own, group in zip(groups, optimizer.groups, strict=True)
        ],
        {to_name[key]: entry for key, entry in optimizer.state.items()},
        optimizer.kind,
    )


def _by_name(
    checkpoint: Checkpoint,
    optimizer: SavedOptimizer,
    groups: Sequence[Sequence[str]],
    names: Mapping[str, Sequence[str]],
) -> SavedOptimizer:
    """Rename the parameters to the model's names, and arrange them in the engine's `groups`."""
    saved = [key for group in optimizer.groups for key in group.keys]
    own = [name for group in groups for name in group]
    match = tensor_names.match({name: names.get(name, [name]) for name in own}, saved)
    if match.missing or match.unexpected:
        parts = [("missing there", match.missing), ("not in an optimizer here", match.unexpected)]
        lines = [f"{what}: {tensor_names.listed(them)}" for what, them in parts if them]
        raise CheckpointMismatch(
            f"The optimizer in {checkpoint.path} has other parameters. Parameters "
            f"{'; '.join(lines)}. Pass the same parameters to the optimizer, or load only the "
            "model: engine.load(path, model_only=True)."
        )
    options = {key: group.options for group in optimizer.groups for key in group.keys}
    arranged = []
    for group in groups:
        found = [options[match.found[name]] for name in group]
        # The source may store groups in a different order, but all parameters of a group must have
        # had the same options. Otherwise some would get another parameter's learning rate.
        for name, other in zip(group, found, strict=True):
            if str(other) != str(found[0]):
                raise CheckpointMismatch(
                    f"{name} and {group[0]} are in one parameter group here, but had different "
                    f"options in {checkpoint.path}. Create the groups as they were, or load only "
                    "the model: engine.load(path, model_only=True)."
                )
        arranged.append(OptimizerGroup(list(group), found[0] if found else {}))
    to_name = {saved_name: name for name, saved_name in match.found.items()}
    state = {to_name.get(key, key): entry for key, entry in optimizer.state.items()}
    if without := [name for name in own if name not in state] if state else []:
        checkpoint.notes.append(
            f"{checkpoint.path} has no optimizer state for {tensor_names.listed(without)}: their "
            "state starts empty."
        )
    return SavedOptimizer(arranged, state, optimizer.kind)


def named_by_order(checkpoint: Checkpoint, optimizer: SavedOptimizer) -> SavedOptimizer | None:
    """Name parameters by the order of the model's tensors. Returns None if this is ambiguous.

    A state_dict and parameters() have the same order, except that a state_dict also contains
    buffers. The order is unambiguous if there is a single group whose state fits the shapes of the
    model's tensors in only one way.
    """
    if not optimizer.is_by_position:
        return optimizer
    if len(optimizer.groups) != 1:
        return None
    keys, tensors = optimizer.groups[0].keys, _parameters(checkpoint)
    wanted = [_shape_of_state(optimizer.state.get(key, {})) for key in keys]
    shapes = [checkpoint.model.specs[name].shape for name in tensors]
    first = _align(wanted, shapes)
    last = _align(wanted[::-1], shapes[::-1])
    # If the leftmost and the rightmost way to fit are the same, there is no other way.
    if first is None or last is None or first != [len(shapes) - 1 - i for i in reversed(last)]:
        return None
    names = [tensors[i] for i in first]
    to_name = dict(zip(keys, names, strict=True))
    if not optimizer.state.keys() <= to_name.keys():
        return None
    return SavedOptimizer(
        [OptimizerGroup(names, optimizer.groups[0].options)],
        {to_name[key]: entry for key, entry in optimizer.state.items()},
        optimizer.kind,
    )


def _shape_of_state(entry: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Return the shape of the parameter to which a state belongs, or None if it is unknown."""
    for key, value in entry.items():
        if key in OF_ELEMENTS and isinstance(value, Leaf):
            return value.shape
    return None


def _align(
    wanted: Sequence[tuple[int, ...] | None], shapes: Sequence[tuple[int, ...]]
) -> list[int] | None:
    """Match each element of `wanted`, in order, to the earliest possible position in `shapes`.

    None in `wanted` matches any shape. Returns the positions, or None if there is no match.
    """
    found: list[int] = []
    for shape in wanted:
        start = found[-1] + 1 if found else 0
        fits = (i for i in range(start, len(shapes)) if shape is None or shapes[i] == shape)
        place = next(fits, None)
        if place is None:
            return None
        found.append(place)
    return found


def _parameters(checkpoint: Checkpoint) -> list[str]:
    """Return, in order, the names of all tensors that may be parameters."""
    return [
        name
        for name in checkpoint.model.specs
        if name not in checkpoint.aliases and name.rpartition(".")[2] not in _BUFFERS
    ]


def _require_names(checkpoint: Checkpoint, optimizer: SavedOptimizer) -> SavedOptimizer:
    """Return `optimizer` with parameter names. Raises CheckpointError if they are ambiguous."""
    named = named_by_order(checkpoint, optimizer)
    if named is None:
        count = sum(len(group.keys) for group in optimizer.groups)
        raise CheckpointError(
            f"{checkpoint.path} stores the optimizer's parameters by position, and {count} "
            f"positions in {many(len(optimizer.groups), 'group')} do not determine names among "
            f"{len(_parameters(checkpoint))} tensors. Load it in a script that has the model, "
            f'engine.load("{checkpoint.path}"), and save. Or import only the weights: '
            "--model-only."
        )
    return named
