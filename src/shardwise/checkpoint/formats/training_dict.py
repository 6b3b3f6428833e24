"""Finds the model, optimizers, step and schedulers in a training script's nested dict.

Scripts and libraries name these parts differently, but nest them in similar ways:

    torch.save({"model": ..., "optimizer": ..., "step": 7})         scripts, Horovod, DDP
    {"state_dict", "optimizer_states", "lr_schedulers", "global_step"}      Lightning
    {"state_dict", "optimizer", "epoch", "state_dict_ema"}                  timm
    {"state": {"model", "optimizers": {"AdamW": ...}, "timestamp"}}         Composer
    {"model", "optim"}, {"app": {"model", "optim"}}                         FSDP2 with DCP
    {NAME: ..., "optimizer": {"state.NAME.exp_avg": ...}, "train_state"}    torchtitan
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from shardwise.checkpoint import json_values
from shardwise.checkpoint.deepspeed.inert import Inert
from shardwise.checkpoint.formats.saved import (
    Leaf,
    MappedReader,
    OptimizerGroup,
    SavedOptimizer,
    as_number,
)
from shardwise.checkpoint.reader import TensorReader
from shardwise.errors import CheckpointError

_MODEL = ("state_dict", "model_state_dict", "model", "module")
"""Keys under which training scripts commonly store a model's state_dict."""

_CURRENT = "current_model_state"
"""Key of Lightning's WeightAveraging: the trained weights. `state_dict` has their average."""

_MORE = ("net", "network", "weights", "model_state", "app", "state")
"""Keys that are tried after `_MODEL`, because they are less common."""

_OPTIMIZER = re.compile(
    r"optimizers?(_states?|_state_dict)?|optim(_state_dict|_state)?|opt|optimizer_[0-9]+"
)
_SCHEDULER = re.compile(r"(lr_)?schedulers?(_state_dict|_states?)?|sched")
_SCALER = ("scaler", "grad_scaler", "amp_scaler", "scaler_state_dict", "MixedPrecision")
_AVERAGE = re.compile(r"(state_dict|model)_ema|ema(_state_dict|_model|_weights)?|model_averages?")
_STEP = ("global_step", "step", "steps", "num_updates", "iteration", "iter", "batch")
_PROGRESS = ("train_state", "timestamp", "Timestamp", "progress", "extra_train_state")
_BESIDE = frozenset({"optimizer", "lr_scheduler", "train_state", "dataloader"})
"""Keys that torchtitan stores next to the names of parameters."""

_DEEPEST = 4
"""Maximum depth of the model in the nested dicts."""


class Unread:
    """Placeholder for a value that cannot be read without running code."""

    def __init__(self, name: str) -> None:
        self.name = name


def nest(entries: Mapping[tuple[Any, ...], Any]) -> dict[Any, Any]:
    """Return nested dicts for the values in `entries`, which are keyed by path.

    A list index in a path becomes an int key. Raises ValueError if two values, or a value and a
    dict, have the same path.
    """
    tree: dict[Any, Any] = {}
    for path, value in entries.items():
        here = tree
        for key in path[:-1]:
            here = here.setdefault(key, {})
            if not isinstance(here, dict):
                raise ValueError(f"{path} is both a value and a dict")
        if path[-1] in here:
            raise ValueError(f"{path} appears twice")
        here[path[-1]] = value
    return tree


def interpret(tree: Any, path: Path) -> dict[str, Any]:
    """Return the parts of a nested dict, as arguments of `Checkpoint`.

    Args:
        tree: Nested dicts and lists, with a Leaf in place of each tensor.
        path: The file or folder, for messages.

    Raises:
        CheckpointError: `tree` contains no state_dict of a model.
    """
    model, levels = _find_model(tree)
    if model is None:
        raise CheckpointError(_no_model(tree, path))
    leaves = {_check_name(path, name): v for name, v in model.items() if isinstance(v, Leaf)}
    leaves = _of_average(leaves)
    found: dict[str, Any] = {"model": MappedReader(leaves), "notes": [], "facts": {}}
    optimizers: list[SavedOptimizer] = []
    for key, value in _entries(levels, model):
        if _OPTIMIZER.fullmatch(key):
            parsed = _parse_optimizers(value)
            if parsed is None:
                found["notes"].append(
                    f"{path} has optimizer state in a form that is not supported (under {key!r}): "
                    "it is not loaded."
                )
            optimizers += parsed or ()
        elif _AVERAGE.fullmatch(key) or (key == _MODEL[0] and model is levels[-1].get(_CURRENT)):
            average, _ = _find_model(value)
            if average is not None:
                found.setdefault("averages", {})[key] = MappedReader(_of_average(average))
            else:
                found["notes"].append(
                    f"{path} has averaged weights in a form that is not supported (under {key!r}): "
                    "they are not loaded."
                )
        elif _SCHEDULER.fullmatch(key):
            found.setdefault("schedulers", {}).update(_schedulers(value, path, found["notes"]))
    found["optimizers"] = optimizers
    found["step"] = _step(levels)
    found["scale"] = _scale(levels)
    for name in found.get("averages", {}):
        found["notes"].append(
            f"{path} also has averaged weights under {name!r}, which are not loaded. To use them: "
            f"`shardwise checkpoint import --weights {name}`."
        )
    for level in levels:
        for key in ("epoch", "pytorch-lightning_version", "composer_version", "arch"):
            value = as_number(level.get(key))
            if isinstance(value, str | int | float):
                found["facts"][key] = str(value)[:80]
    return found


def _of_average(weights: Mapping[Any, Any]) -> dict[str, Leaf]:
    """Return a model's tensors, without the additional entries that averaging classes add.

    torch's AveragedModel has `module.NAME` and a counter. ema_pytorch has `ema_model.NAME`, the
    trained weights as `online_model.NAME`, and counters.
    """
    leaves = {str(name): value for name, value in weights.items() if isinstance(value, Leaf)}
    for prefix, others in (("module.", {"n_averaged"}), ("ema_model.", {"initted", "step"})):
        rest = {n for n in leaves if not n.startswith((prefix, "online_model."))}
        if rest and rest <= others:
            return {n.removeprefix(prefix): v for n, v in leaves.items() if n.startswith(prefix)}
    return leaves


def _entries(
    levels: Sequence[Mapping[Any, Any]], model: Mapping[Any, Any]
) -> Iterator[tuple[str, Any]]:
    """Yield all entries of the dicts in `levels` except tensors and the model, outermost first."""
    for level in levels:
        for key, value in level.items():
            if isinstance(key, str) and value is not model and not isinstance(value, Leaf):
                yield key, value


def is_weights(tree: Any) -> bool:
    """Return whether `tree` is a state_dict: tensors by name, optionally with extra state."""
    if not isinstance(tree, Mapping):
        return False
    others = [
        key
        for key, value in tree.items()
        if not isinstance(value, Leaf) and not str(key).endswith("_extra_state")
    ]
    return not others and any(isinstance(value, Leaf) for value in tree.values())


def _find_model(tree: Any, depth: int = 0) -> tuple[Mapping[Any, Any] | None, list[Any]]:
    """Return the model's state_dict in `tree` (None if there is none), and the dicts around it."""
    if is_weights(tree):
        return tree, []
    if not isinstance(tree, Mapping) or depth == _DEEPEST:
        return None, []
    # An optimizer's state_dict has a key `state` too.
    if "param_groups" in tree:
        return None, []
    leaves = {key: value for key, value in tree.items() if isinstance(value, Leaf)}
    if leaves and tree.keys() - leaves.keys() <= _BESIDE:
        return leaves, [tree]
    for key in (_CURRENT, *_MODEL, *_MORE):
        if isinstance(tree.get(key), Mapping):
            model, levels = _find_model(tree[key], depth + 1)
            if model is not None:
                return model, [tree, *levels]
    return None, []


def _no_model(tree: Any, path: Path) -> str:
    if isinstance(tree, Mapping) and any(isinstance(tree.get(k), Inert) for k in _MODEL):
        return (
            f"{path} contains a pickled module, which cannot be read without running its code. "
            "Save model.state_dict() instead."
        )
    if isinstance(tree, Mapping) and "param_groups" in tree:
        return (
            f"{path} contains only the state of an optimizer. Name the file or folder that has the "
            "model."
        )
    return (
        f"{path} contains no state_dict, neither at the top nor under {', '.join(_MODEL)}. Save "
        "only model.state_dict()."
    )


def _check_name(path: Path, name: Any) -> str:
    if not isinstance(name, str):
        raise CheckpointError(
            f"{path} has a tensor under {name!r:.60}, which is not a name: the keys of a "
            "state_dict() are text. Save only model.state_dict()."
        )
    return name


# -- progress ----------------------------------------------------------------------------------


def _step(levels: Sequence[Mapping[Any, Any]]) -> int | None:
    """Return the number of updates, or None if it is not stored."""
    places = [level[key] for level in levels for key in _PROGRESS if key in level]
    # Composer nests its counters one level deeper.
    places += [place["Timestamp"] for place in places if _has(place, "Timestamp")]
    for place in [*places, *levels]:
        for key in _STEP if isinstance(place, Mapping) else ():
            value = as_number(place.get(key))
            if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**62:
                return value
    return None


def _has(place: Any, key: str) -> bool:
    return isinstance(place, Mapping) and key in place


def _scale(levels: Sequence[Mapping[Any, Any]]) -> tuple[float, int] | None:
    """Return a GradScaler's loss scale and growth counter, or None if there is no GradScaler."""
    for level in levels:
        for key in _SCALER:
            state = level.get(key)
            if not isinstance(state, Mapping):
                continue
            scale, steps = as_number(state.get("scale")), as_number(state.get("_growth_tracker", 0))
            if isinstance(scale, int | float) and isinstance(steps, int) and scale > 0:
                return float(scale), max(steps, 0)
    return None


def _schedulers(value: Any, path: Path, notes: list[str]) -> dict[str, Any]:
    """Return the states of the schedulers, by name, except those that cannot be stored."""
    states = value if isinstance(value, list | tuple) else [value]
    # Composer stores schedulers by class, and DCP stores lists as dicts.
    if isinstance(value, Mapping) and all(isinstance(v, Mapping) for v in value.values()):
        states = list(value.values())
    found: dict[str, Any] = {}
    for number, state in enumerate(states):
        plain = plain_value(state)
        name = "lr_scheduler" if len(states) == 1 else f"lr_scheduler_{number}"
        try:
            json_values.encode(plain)
        except json_values.NotPlain as error:
            notes.append(f"{path} has the state of a scheduler with {error}: it is not loaded.")
            continue
        if isinstance(plain, Mapping) and plain:
            found[name] = plain
    return found


def plain_value(value: Any) -> Any:
    """Return a nested value with each Leaf replaced by its tensor."""
    if isinstance(value, Leaf):
        return value.value()
    if isinstance(value, Mapping):
        return {key: plain_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(plain_value(item) for item in value)
    return value


# -- optimizers --------------------------------------------------------------------------------


def _parse_optimizers(value: Any) -> list[SavedOptimizer] | None:
    """Return the optimizers in `value`, or None if its form is unknown."""
    if isinstance(value, list | tuple):
        parsed = [_parse_optimizers(item) for item in value]
        return None if None in parsed else [one for ones in parsed for one in ones or ()]
    if not isinstance(value, Mapping) or not value:
        return None
    if "param_groups" in value and isinstance(value.get("state", {}), Mapping):
        return [_parse_optimizer(value.get("state", {}), value["param_groups"])]
    if all(isinstance(k, str) and k.partition(".")[0] in ("state", "param_groups") for k in value):
        return [_parse_flat(value)]
    # Composer stores optimizers by class, and DCP stores lists as dicts.
    parts = [_parse_optimizers(item) for item in value.values() if isinstance(item, Mapping)]
    if len(parts) != len(value) or None in parts:
        return None
    return [one for ones in parts for one in ones or ()]


def _parse_optimizer(state: Mapping[Any, Any], groups: Any) -> SavedOptimizer:
    """Parse an optimizer's state_dict in torch's form."""
    listed = [groups[k] for k in sorted(groups)] if isinstance(groups, Mapping) else list(groups)
    parsed = []
    for group in listed:
        options = {str(k): plain_value(v) for k, v in group.items()}
        keys = _as_list(options.pop("params"))
        names = options.pop("param_names", None)
        # torch stores names next to positions if the optimizer was given named parameters.
        named = _as_list(names) if names is not None else keys
        parsed.append((keys, named if len(named) == len(keys) else keys, options))
    to_name = {
        key: name for keys, named, _ in parsed for key, name in zip(keys, named, strict=True)
    }
    # DCP turns positions into text.
    as_text = {str(key): name for key, name in to_name.items()}
    entries = {
        to_name[key] if key in to_name else as_text.get(key, key): dict(entry)
        for key, entry in state.items()
    }
    return SavedOptimizer([OptimizerGroup(named, o) for _, named, o in parsed], entries)


def _as_list(value: Any) -> list[Any]:
    if isinstance(value, Mapping):  # DCP has flattened every item of the list
        value = [value[key] for key in sorted(value)]
    if not isinstance(value, list | tuple) or not all(isinstance(k, str | int) for k in value):
        raise TypeError(f"the parameters of a group are {value!r:.60}")
    return list(value)


def _parse_flat(value: Mapping[str, Any]) -> SavedOptimizer:
    """Parse torchtitan's form: `state.NAME.KEY` and `param_groups.NAME.OPTION`.

    This form does not store the groups, so parameters with equal options form a group.
    """
    state: dict[Any, dict[str, Any]] = {}
    options: dict[str, dict[str, Any]] = {}
    for key, entry in value.items():
        kind, _, rest = key.partition(".")
        name, _, last = rest.rpartition(".")
        target = state if kind == "state" else options
        target.setdefault(name, {})[last] = entry if kind == "state" else plain_value(entry)
    groups: list[OptimizerGroup] = []
    for name, own in options.items():
        own.pop("params", None)
        same = next((group for group in groups if _equal(group.options, own)), None)
        if same is None:
            groups.append(OptimizerGroup([name], own))
        else:
            same.keys.append(name)
    return SavedOptimizer(groups, state)


def _equal(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        v.equal(other[k])
        if isinstance(v, Tensor) and isinstance(other[k], Tensor)
        else v == other[k]
        for k, v in one.items()
    )


def leaves_of(model: TensorReader) -> dict[str, Leaf]:
    """Return a Leaf for each tensor in `model`, by name."""
    return {name: Leaf(model, name) for name in model.specs}
