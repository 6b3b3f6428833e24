"""Writes and reads the optimizers' part of checkpoint.json: options, and single values of state."""

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


@dataclass(frozen=True)
class OptimizerFields:
    """What stands in checkpoint.json of the optimizers: by optimizer and group the options, by
    parameter what is one value, the parameters at which segments were cut, and by optimizer what
    it kept in attributes (None where that is not said)."""

    options: list[list[dict[str, Any]]]
    state: dict[str, dict[str, Any]]
    borders: list[str]
    attributes: list[dict[str, Any] | None]

    def take_options(self, optimizers: Sequence[optim.Optimizer]) -> None:
        """Let the groups have the options (rates, what schedulers keep there) that were saved."""
        for optimizer, several in zip(optimizers, self.options, strict=True):
            for group, saved in zip(optimizer.param_groups, several, strict=True):
                for key, value in saved.items():
                    now = group.get(key)
                    if isinstance(now, Tensor) and isinstance(value, Tensor):
                        now.copy_(value)  # a rate that is a tensor may be part of a CUDA graph
                    else:
                        group[key] = value


def encoded(engine_tensors: EngineTensors) -> list[dict[str, Any]]:
    """Return for each optimizer its class, its groups with their options, and its attributes.

    Raises CheckpointError for a value that no file can hold.
    """
    names = engine_tensors.optimized
    return [
        {
            "class": type(optimizer).__name__,
            "groups": [
                {
                    "parameters": [names[p] for p in group["params"]],
                    "options": {
                        key: _encoded(value, f"option {key} of {type(optimizer).__name__}")
                        for key, value in group.items()
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


def encoded_state(
    numbers: Mapping[str, Mapping[str, Any]],
) -> tuple[dict[str, dict[str, Any]], str | None]:
    """Return by parameter the state that is one value each, as JSON, and why a value cannot be
    saved, if so."""
    try:
        return {
            name: {key: _encoded(value, f"{key} of {name}") for key, value in entries.items()}
            for name, entries in numbers.items()
        }, None
    except CheckpointError as error:
        return {}, str(error)


def _encoded(value: Any, what: str) -> Any:
    try:
        return json_values.encode(value)
    except json_values.NotPlain as error:
        raise CheckpointError(
            f"The optimizer keeps {what} as {error}, which a checkpoint cannot hold: tensors, "
            "numbers, text, and lists and maps of those."
        ) from error


def read(fields: Mapping[str, Any]) -> OptimizerFields:
    """Raises BrokenCheckpoint for what cannot have been written."""
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
    """Raise BrokenCheckpoint for one that would only fail in an update: no number, or one in
    another form (a tensor or not) than those of the optimizer's other parameters."""
    forms = Counter(isinstance(step, Tensor) for step in steps.values())
    # Whether a step is a tensor depends on the optimizer, so most of them say what is right.
    usual = forms[True] >= forms[False]
    for name, step in steps.items():
        if _kind(step) != NUMBER or isinstance(step, Tensor) != usual:
            raise BrokenCheckpoint(
                f"The step of {name} in checkpoint.json is {step!r:.60}, which is no number, or in "
                "another form than the steps of others. Take another checkpoint."
            )


def check(
    engine_tensors: EngineTensors, fields: Mapping[str, Any], numbers: OptimizerFields
) -> None:
    """Raise CheckpointMismatch for other optimizers, groups or parameters in them than those that
    were saved, BrokenCheckpoint for options that cannot be theirs."""
    classes = [(type(o).__name__, len(o.param_groups)) for o in engine_tensors.spec.optimizers]
    there = [(described["class"], len(described["groups"])) for described in fields["optimizers"]]
    if len(there) == len(classes):  # a class that is not said may be any
        there = [(name or own[0], count) for own, (name, count) in zip(classes, there, strict=True)]
    if classes != there:

        def said(several: list[tuple[str, int]]) -> str:
            return " and ".join(f"{name} of {count} group(s)" for name, count in several)

        raise CheckpointMismatch(
            f"The checkpoint is of the optimizers {said(there)}, and here are {said(classes)}. "
            "Make the same ones, or load the model alone: engine.load(path, model_only=True)."
        )
    _check_groups(engine_tensors, fields)
    _check_kind(engine_tensors.spec.optimizers, fields, numbers)
    _check_options(engine_tensors.spec.optimizers, numbers)
    lost = sorted(set(fields["state"]) - set(engine_tensors.optimized.values()))
    if lost:
        raise CheckpointMismatch(
            f"The checkpoint has optimizer state of parameters that are in no optimizer here: "
            f"{listed(lost)}. Give the optimizer the same ones, or load the model alone: "
            "model_only=True."
        )


def _check_groups(engine_tensors: EngineTensors, fields: Mapping[str, Any]) -> None:
    """Options go to groups by their place: raise CheckpointMismatch where that is another's."""
    there = {
        name: place
        for place, group in enumerate(
            _groups(described["groups"] for described in fields["optimizers"])
        )
        for name in group["parameters"]
    }
    names = engine_tensors.optimized
    optimizers = engine_tensors.spec.optimizers
    for place, group in enumerate(_groups(optimizer.param_groups for optimizer in optimizers)):
        for name in (names[p] for p in group["params"]):
            if there.get(name, place) != place:
                raise CheckpointMismatch(
                    f"{name} is in parameter group {place} here and was in group {there[name]} "
                    "when the checkpoint was saved (counted over all optimizers), so it would get "
                    "the rate and the options of others. Make the groups in the same order, or "
                    "load the model alone: engine.load(path, model_only=True)."
                )


_OF_SCHEDULERS = {"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "lr_scale"}
"""Options that schedulers add to groups."""

_ADAMW = "decoupled_weight_decay"
"""The option of torch's AdamW that its Adam has as False."""


def _check_kind(
    optimizers: Sequence[optim.Optimizer], fields: Mapping[str, Any], numbers: OptimizerFields
) -> None:
    """Raise CheckpointMismatch where the options of an optimizer whose class is not said are those
    of another class than here."""
    for described, optimizer, several in zip(
        fields["optimizers"], optimizers, numbers.options, strict=True
    ):
        if described["class"]:
            continue
        for group, saved in zip(optimizer.param_groups, several, strict=True):
            odd = sorted(set(saved) - set(group) - _OF_SCHEDULERS)
            if saved.get(_ADAMW, group.get(_ADAMW)) != group.get(_ADAMW):
                odd.append(_ADAMW)
            if odd:
                raise CheckpointMismatch(
                    f"The checkpoint is of an optimizer with {listed(odd)}, and here it is "
                    f"{type(optimizer).__name__}, which differs in that. Make the optimizer that "
                    "was saved, or load the model alone: engine.load(path, model_only=True)."
                )


NUMBER = "a number"

_SWITCHES = {"foreach", "fused"}
"""Options of torch's optimizers that are None until somebody turns them on or off."""


def _check_options(optimizers: Sequence[optim.Optimizer], numbers: OptimizerFields) -> None:
    """Options of another kind than the optimizer has would only fail in its update."""
    for optimizer, several in zip(optimizers, numbers.options, strict=True):
        for place, (group, saved) in enumerate(zip(optimizer.param_groups, several, strict=True)):
            for key, value in saved.items():
                now = group.get(key)
                switch = key not in _SWITCHES or value is None or isinstance(value, bool)
                if not (switch and _fits(now, value)):
                    raise BrokenCheckpoint(
                        f"{key} of group {place} of {type(optimizer).__name__} is {value!r:.60} in "
                        f"checkpoint.json, and {now!r:.60} here, which is of another kind. Take "
                        "another checkpoint."
                    )


def _fits(now: Any, saved: Any) -> bool:
    """Whether `saved` may stand where `now` does: any number for another, None for a switch."""
    if now is None or (saved is None and not isinstance(now, int | float)):
        return True
    if saved is None:
        return isinstance(now, bool)
    if isinstance(now, tuple) and isinstance(saved, tuple | list):
        return len(now) == len(saved) and all(map(_fits, now, saved))
    return _kind(now) == _kind(saved)


def _kind(value: Any) -> str:
    if isinstance(value, bool | int | float):
        return NUMBER
    if isinstance(value, Tensor):
        return NUMBER if value.numel() == 1 else f"a tensor of {tuple(value.shape)}"
    return "a list" if isinstance(value, list | tuple) else type(value).__name__


def _groups(several: Iterable[Sequence[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    return itertools.chain.from_iterable(several)
