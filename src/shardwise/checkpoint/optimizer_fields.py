"""Encodes, decodes and checks the optimizer fields of checkpoint.json: options and scalar state."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, optim

from shardwise.checkpoint import attribute_values, json_values
from shardwise.checkpoint.tensor_names import listed
from shardwise.checkpoint.tensors import EngineTensors
from shardwise.errors import BrokenCheckpoint, CheckpointError, CheckpointMismatch
from shardwise.messages.printable import many


@dataclass(frozen=True)
class OptimizerFields:
    """The decoded optimizer fields of checkpoint.json.

    Args:
        options: Options of each parameter group, by optimizer and group.
        state: Scalar state, by parameter name and key.
        borders: Names of the parameters at which optimizer state is cut into segments.
        attributes: Encoded attributes of each optimizer, or None if they were not saved.
    """

    options: list[list[dict[str, Any]]]
    state: dict[str, dict[str, Any]]
    borders: list[str]
    attributes: list[dict[str, Any] | None]

    def take_options(self, optimizers: Sequence[optim.Optimizer]) -> None:
        """Set all options of the parameter groups, such as learning rates, to the saved values."""
        for optimizer, saved_groups in zip(optimizers, self.options, strict=True):
            for group, saved in zip(optimizer.param_groups, saved_groups, strict=True):
                for key, value in saved.items():
                    now = group.get(key)
                    if isinstance(now, Tensor) and isinstance(value, Tensor):
                        # Copy in place, because a CUDA graph may read a tensor learning rate.
                        now.copy_(value)
                    else:
                        group[key] = value


def encode_optimizers(engine_tensors: EngineTensors) -> list[dict[str, Any]]:
    """Return each optimizer's class, parameter groups and attributes, encoded as JSON.

    Raises CheckpointError if a value cannot be encoded.
    """
    names = engine_tensors.optimizer_names
    return [
        {
            "class": type(optimizer).__name__,
            "groups": [
                {
                    "parameters": [names[p] for p in group["params"]],
                    "options": {
                        key: _encode(value, f"option {key} of {type(optimizer).__name__}")
                        for key, value in group.items()
                        # Parameters are saved by name, so torch's param_names are not needed.
                        if key not in ("params", "param_names")
                    },
                }
                for group in optimizer.param_groups
            ],
        }
        | ({} if values is None else {"attributes": values.fields})
        for optimizer, values in zip(
            engine_tensors.spec.optimizers, engine_tensors.attributes, strict=True
        )
    ]


def encode_state(
    numbers: Mapping[str, Mapping[str, Any]],
) -> tuple[dict[str, dict[str, Any]], str | None]:
    """Encode scalar state as JSON.

    Args:
        numbers: Values by parameter name and key.

    Returns:
        The encoded values and None. If a value cannot be encoded: {} and an error message.
    """
    try:
        return {
            name: {key: _encode(value, f"{key} of {name}") for key, value in entries.items()}
            for name, entries in numbers.items()
        }, None
    except CheckpointError as error:
        return {}, str(error)


def _encode(value: Any, what: str) -> Any:
    try:
        return json_values.encode(value)
    except json_values.NotPlain as error:
        raise CheckpointError(
            f"The optimizer stores {what} as {error}, which a checkpoint cannot hold. Use "
            "tensors, numbers, strings, and lists and dicts of these."
        ) from error


def read(fields: Mapping[str, Any]) -> OptimizerFields:
    """Decode the optimizer fields of checkpoint.json.

    Raises BrokenCheckpoint if a field has a value that a save never writes.
    """
    state = {
        name: {key: json_values.decode(value) for key, value in entries.items()}
        for name, entries in fields["state"].items()
    }
    for described in fields["optimizers"]:
        names = [name for group in described["groups"] for name in group["parameters"]]
        attribute_values.check(described.get("attributes", {}))
        _check_steps({n: state[n]["step"] for n in names if "step" in state.get(n, {})})
    return OptimizerFields(
        [
            [
                {key: json_values.decode(v) for key, v in g["options"].items()}
                for g in described["groups"]
            ]
            for described in fields["optimizers"]
        ],
        state,
        fields["borders"],
        [described.get("attributes") for described in fields["optimizers"]],
    )


def _check_steps(steps: Mapping[str, Any]) -> None:
    """Raise BrokenCheckpoint if a parameter's step count is invalid.

    Step counts must be single numbers. Either all of them or none must be tensors. Otherwise,
    loading would succeed, but the next optimizer update would fail.

    Args:
        steps: Step counts by parameter name.
    """
    forms = Counter(isinstance(step, Tensor) for step in steps.values())
    # Some optimizers use tensors and others do not, so the majority decides which is right.
    usual = forms[True] >= forms[False]
    for name, step in steps.items():
        if _kind(step) != NUMBER or isinstance(step, Tensor) != usual:
            raise BrokenCheckpoint(
                f"The step of {name} in checkpoint.json is {step!r:.60}, which is not a number or "
                "has another type than the other steps. Use another checkpoint."
            )


def check(
    engine_tensors: EngineTensors, fields: Mapping[str, Any], numbers: OptimizerFields
) -> None:
    """Check that the saved optimizers match this engine's optimizers.

    Raises CheckpointMismatch if the optimizers, their parameter groups or their parameters differ.
    Raises BrokenCheckpoint if an option has the wrong type.
    """
    classes = [(type(o).__name__, len(o.param_groups)) for o in engine_tensors.spec.optimizers]
    saved = [(described["class"], len(described["groups"])) for described in fields["optimizers"]]
    if len(saved) == len(classes):  # an optimizer saved without a class name matches any class
        saved = [(name or own[0], count) for own, (name, count) in zip(classes, saved, strict=True)]
    if classes != saved:

        def describe(optimizers: list[tuple[str, int]]) -> str:
            return " and ".join(f"{name} with {many(count, 'group')}" for name, count in optimizers)

        raise CheckpointMismatch(
            f"The checkpoint has the optimizers {describe(saved)}, but this engine has "
            f"{describe(classes)}. Create the same optimizers, or load only the model: "
            "engine.load(path, model_only=True)."
        )
    # From the most general to the most specific check, so that the message names the real cause.
    _check_groups(engine_tensors, fields)
    _check_kind(engine_tensors.spec.optimizers, fields, numbers)
    _check_options(engine_tensors.spec.optimizers, numbers)
    unknown = sorted(set(fields["state"]) - set(engine_tensors.optimizer_names.values()))
    if unknown:
        raise CheckpointMismatch(
            f"The checkpoint has optimizer state for parameters that no optimizer here has: "
            f"{listed(unknown)}. Pass the same parameters to the optimizer, or load only the "
            "model: engine.load(path, model_only=True)."
        )


def _check_groups(engine_tensors: EngineTensors, fields: Mapping[str, Any]) -> None:
    """Raise CheckpointMismatch if a parameter is in a different group than in the checkpoint.

    Groups are matched by position, so the parameter would get the wrong group's options.
    """
    saved_places = {
        name: place
        for place, group in enumerate(
            _groups(described["groups"] for described in fields["optimizers"])
        )
        for name in group["parameters"]
    }
    names = engine_tensors.optimizer_names
    optimizers = engine_tensors.spec.optimizers
    for place, group in enumerate(_groups(optimizer.param_groups for optimizer in optimizers)):
        for name in (names[p] for p in group["params"]):
            if saved_places.get(name, place) != place:
                raise CheckpointMismatch(
                    f"{name} is in parameter group {place} here, but was in group "
                    f"{saved_places[name]} when the checkpoint was saved (counted over all "
                    "optimizers). It would get the learning rate and options of the wrong group. "
                    "Create the groups in the same order, or load only the model: "
                    "engine.load(path, model_only=True)."
                )


_OF_SCHEDULERS = {"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "lr_scale"}
"""Options that learning-rate schedulers add to a parameter group."""

_ADAMW = "decoupled_weight_decay"
"""Option that is True in torch's AdamW and False in its Adam."""


def _check_kind(
    optimizers: Sequence[optim.Optimizer], fields: Mapping[str, Any], numbers: OptimizerFields
) -> None:
    """Raise CheckpointMismatch if the saved options belong to a different optimizer class.

    Applies to DeepSpeed checkpoints, which do not record the optimizer's class.
    """
    for described, optimizer, saved_groups in zip(
        fields["optimizers"], optimizers, numbers.options, strict=True
    ):
        if described["class"]:
            continue
        for group, saved in zip(optimizer.param_groups, saved_groups, strict=True):
            # An option that this class does not have shows that the saved class is a different one.
            odd = sorted(set(saved) - set(group) - _OF_SCHEDULERS)
            if saved.get(_ADAMW, group.get(_ADAMW)) != group.get(_ADAMW):
                odd.append(_ADAMW)
            if odd:
                raise CheckpointMismatch(
                    f"The checkpoint has an optimizer with {listed(odd)}, unlike "
                    f"{type(optimizer).__name__} here. Build the optimizer that was saved, or "
                    "load only the model: engine.load(path, model_only=True)."
                )


NUMBER = "a number"

_SWITCHES = {"foreach", "fused"}
"""Options of torch's optimizers that are None unless the user sets them."""


def _check_options(optimizers: Sequence[optim.Optimizer], numbers: OptimizerFields) -> None:
    """Raise BrokenCheckpoint if an option has the wrong type.

    Without this check, the error would not occur until the next optimizer update.
    """
    for optimizer, saved_groups in zip(optimizers, numbers.options, strict=True):
        for place, (group, saved) in enumerate(
            zip(optimizer.param_groups, saved_groups, strict=True)
        ):
            for key, value in saved.items():
                now = group.get(key)
                switch = key not in _SWITCHES or value is None or isinstance(value, bool)
                if not (switch and _fits(now, value)):
                    raise BrokenCheckpoint(
                        f"checkpoint.json sets {key} of group {place} of "
                        f"{type(optimizer).__name__} to {value!r:.60}, which has another type than "
                        f"{now!r:.60} here. Use another checkpoint."
                    )


def _fits(now: Any, saved: Any) -> bool:
    """Return whether `saved` may replace an option's current value `now`."""
    if now is None or (saved is None and not isinstance(now, int | float)):
        return True
    if saved is None:
        return isinstance(now, bool)
    if isinstance(now, tuple) and isinstance(saved, tuple | list):
        return len(now) == len(saved) and all(map(_fits, now, saved))
    return _kind(now) == _kind(saved)


def _kind(value: Any) -> str:
    # bool counts as a number, because scripts may write 0 or 1 for False or True.
    if isinstance(value, bool | int | float):
        return NUMBER
    if isinstance(value, Tensor):
        return NUMBER if value.numel() == 1 else f"a tensor of {tuple(value.shape)}"
    return "a list" if isinstance(value, list | tuple) else type(value).__name__


def _groups(group_lists: Iterable[Sequence[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    return itertools.chain.from_iterable(group_lists)
