"""Builds a plain state_dict from an engine's optimizer state, and loads one.

torch reads `state` and `param_groups` of a state_dict and ignores other keys. Values that a plain
optimizer does not have are therefore stored under additional keys:

    state                {0: {"step": ..., "exp_avg": ...}, ...}
    param_groups         [{"lr": ..., "params": [0, ...]}, ...]
    fp32_master_weights  {0: ..., ...}, for 16-bit parameters
    fp32_gradients       True if gradients of 16-bit parameters are summed in fp32, which starts
                         after the first step with several backward passes
    loss_weight_divisor  for a resume, if not all loss weights are 1: the number by which loss
                         weights are divided in the backward pass. It cancels out in the update,
                         except for rounding.
    attributes           values that the optimizer stores in attributes and changes in its steps,
                         and the optimizer that it wraps: see `attribute_values`

fp32 masters are not in `state`: torch would round them to 16 bits and keep them forever, and it
would treat a parameter that has only a master in its state as already initialised.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn, optim

from shardwise.engine.build import States
from shardwise.engine.engine_spec import EngineSpec
from shardwise.errors import UsageError
from shardwise.model.optimizer_access import held
from shardwise.model.precision import NARROW, widen_state
from shardwise.states.optimizer.optimizer_kind import common_state, placed, state_shape
from shardwise.states.parameters.sharded_parameters import ShardedParameters

MASTERS = "fp32_master_weights"
WIDE = "fp32_gradients"
DIVISOR = "loss_weight_divisor"
ATTRIBUTES = "attributes"


def only(spec: EngineSpec, optimizer: optim.Optimizer | None) -> optim.Optimizer:
    """Return `optimizer`, or the engine's only optimizer if it is None.

    Raises UsageError if `optimizer` belongs to another engine, or if it is None and there are
    several.
    """
    if optimizer is None and len(spec.optimizers) != 1:
        raise UsageError("This engine has several optimizers: pass one of them as `optimizer`.")
    if optimizer is not None and not any(optimizer is each for each in spec.optimizers):
        raise UsageError(
            f"This {type(optimizer).__name__} does not belong to this engine: pass one of the "
            "optimizers that sw.Engine(...) was created with."
        )
    return spec.optimizers[0] if optimizer is None else optimizer


def make(
    spec: EngineSpec,
    states: States,
    optimizer: optim.Optimizer,
    unit: float | None,
    resting: Mapping[nn.Parameter, Tensor],
) -> dict[str, Any]:
    """Build the state_dict that `Engine.optimizer_state_dict` returns. Collective.

    `unit` is the number by which loss weights are divided, or None to omit it. `resting` contains
    the fp32 masters of frozen parameters.
    """
    # A parameter that was frozen during training has its state in the user's optimizer.
    whole = _whole(spec, optimizer, {**held(optimizer), **states.gathering.optimizer_state()})
    wide = {p: {MASTERS: master} for p, master in _masters_now(states).items()}
    known = _whole(spec, optimizer, wide) | {p: {MASTERS: kept} for p, kept in resting.items()}
    # torch numbers parameters in the order of their groups, each parameter once.
    numbers: dict[nn.Parameter, int] = {}
    groups = []
    for group in optimizer.param_groups:
        members = [numbers.setdefault(p, len(numbers)) for p in group["params"]]
        groups.append({**group, "params": members})
    # Move state that belongs to no parameter back into the user's optimizer, where `common_state`
    # finds it.
    states.optimizer.return_common_state()
    own = {number: whole[p] for p, number in numbers.items() if p in whole}
    plain: dict[str, Any] = {
        "state": own | common_state(held(optimizer)),
        "param_groups": groups,
    }
    masters = {number: known[p][MASTERS] for p, number in numbers.items() if p in known}
    if masters:
        plain |= {MASTERS: masters, WIDE: states.gradients.wide}
    return plain if unit is None else plain | {DIVISOR: unit}


def _masters_now(states: States) -> dict[nn.Parameter, Tensor]:
    """Return the fp32 master of each 16-bit parameter. Collective.

    If user code has written to a parameter, the master is its new value, as in the next step.
    """
    masters = states.gathering.wide_masters()
    # Sharded parameters can only be written in full_parameters, which updates the masters itself.
    is_sharded = isinstance(states.parameters, ShardedParameters)
    for index in () if is_sharded else states.parameters.written():
        parameter = states.parameters.named[index].parameter
        if parameter in masters:
            masters[parameter] = parameter.detach().float()
    return masters


def _whole(
    spec: EngineSpec, optimizer: optim.Optimizer, held: dict[Any, dict[str, Any]]
) -> dict[Any, dict[str, Any]]:
    """Gather the full optimizer state across pipeline stages and split tensors. Collective."""
    if spec.pipeline is not None:
        held = held | spec.pipeline.ownership.gather_other_states(held, spec.optimizers)
    if spec.tensor is not None:
        if spec.pipeline is not None:
            spec.tensor.share_split_keys(spec.pipeline.group, spec.optimizers)
        order = [p for group in optimizer.param_groups for p in group["params"] if p in held]
        held = {p: spec.tensor.whole_state(p, held[p]) for p in order}
    if spec.experts is not None:
        held = spec.experts.whole_states(optimizer, held)
    return held


def misfit(optimizer: optim.Optimizer, state: Mapping[str, Any]) -> str | None:
    """Return the error if groups or shapes in `state` do not fit `optimizer`, otherwise None."""
    name = type(optimizer).__name__
    if not {"state", "param_groups"} <= set(state):
        return (
            "This is not the state_dict of an optimizer, which has the keys state and "
            f"param_groups: it has {', '.join(map(str, state)) or 'no keys'}."
        )
    # Don't compare names: as in torch, parameters are matched by number.
    theirs = [len(group["params"]) for group in state["param_groups"]]
    ours = [len(group["params"]) for group in optimizer.param_groups]
    if theirs != ours:
        return (
            f"This state_dict has parameter groups of {theirs} parameters, but {name} has {ours}. "
            "Build the optimizer over the same parameters, in the same groups."
        )
    return _wrong_extra_keys(optimizer, state) or _wrong_shape(optimizer, state)


def _wrong_extra_keys(optimizer: optim.Optimizer, state: Mapping[str, Any]) -> str | None:
    """Return the error if a key that torch ignores has an invalid value, otherwise None."""
    unit = state.get(DIVISOR, 1.0)
    if not isinstance(unit, int | float) or not 0 < unit < math.inf:
        return (
            f"{DIVISOR} is {unit!r} in this state_dict, but engine.optimizer_state_dict() writes a "
            "number above 0: restore the number, or remove the key."
        )
    for parameter, master in _masters(optimizer, state).items():
        shape = tuple(master.shape) if isinstance(master, Tensor) else None
        if shape != tuple(parameter.shape):
            found = type(master).__name__ if shape is None else f"tensor of shape {shape}"
            return (
                f"{MASTERS} has a {found} in this state_dict, for a parameter of shape "
                f"{tuple(parameter.shape)}: it belongs to another model."
            )
    return None


def _wrong_shape(optimizer: optim.Optimizer, state: Mapping[str, Any]) -> str | None:
    """Return the error for the first tensor in `state` with a wrong shape, or None."""
    name = type(optimizer).__name__
    for parameter, entries in _by_parameter(optimizer, state, state["state"]).items():
        for key, value in entries.items():
            if not isinstance(value, Tensor) or not value.ndim:
                continue
            # None for an optimizer that is not in torch.optim: its state may have any shape.
            known = state_shape(type(optimizer), key, parameter.shape)
            if known is not None and tuple(value.shape) != known:
                return (
                    f"{key} of a parameter of shape {tuple(parameter.shape)} has the shape "
                    f"{tuple(value.shape)} in this state_dict, but {name} uses {known}: it belongs "
                    "to another model."
                )
    return None


def give(optimizer: optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Load `state` into `optimizer`, cast to the engine's dtypes.

    16-bit state of a 16-bit parameter, as in a plain optimizer, becomes fp32.
    """
    for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
        group.update({k: v for k, v in saved.items() if k not in ("params", "param_names")})
    options = {p: group for group in optimizer.param_groups for p in group["params"]}
    by_parameter = {
        parameter: {
            key: placed(key, value, parameter.device, options[parameter])
            for key, value in entries.items()
        }
        for parameter, entries in _as_updated(optimizer, state).items()
    }
    numbers = {number for group in state["param_groups"] for number in group["params"]}
    common = {k: v for k, v in state["state"].items() if k not in numbers}
    held(optimizer).clear()
    held(optimizer).update(by_parameter | common)


def _as_updated(
    optimizer: optim.Optimizer, state: Mapping[str, Any]
) -> dict[nn.Parameter, dict[str, Any]]:
    """Return each parameter's optimizer state, in the dtypes that the engine's updates use."""
    # A state_dict with masters was saved by an engine, so its state is already fp32.
    mastered = _masters(optimizer, state)
    return {
        parameter: entries if parameter in mastered else widen_state(parameter, entries)
        for parameter, entries in _by_parameter(optimizer, state, state["state"]).items()
    }


def numbers(state: Mapping[str, Any]) -> tuple[bool, float | None]:
    """Return whether gradients are summed in fp32, and the divisor of loss weights (or None)."""
    return bool(state.get(WIDE)), state.get(DIVISOR)


def refine(
    known: dict[nn.Parameter, Tensor], optimizer: optim.Optimizer, state: Mapping[str, Any]
) -> dict[nn.Parameter, Tensor]:
    """Replace masters in `known` with those in `state`. Return the masters of frozen parameters."""
    saved = _masters(optimizer, state)
    for parameter in saved.keys() & known.keys():
        known[parameter] = _finer(parameter, saved[parameter], known[parameter])
    # Frozen parameters are in no bucket, so keep their masters until they are trained again.
    narrow = [p for p in saved if p.dtype in NARROW]
    return {p: saved[p] for p in narrow if not p.requires_grad}


def thawed(resting: dict[nn.Parameter, Tensor]) -> dict[nn.Parameter, Tensor]:
    """Remove and return the masters in `resting` whose parameters are trainable again."""
    trained = [parameter for parameter in resting if parameter.requires_grad]
    return {p: _finer(p, resting.pop(p), p.detach().float()) for p in trained}


def _finer(parameter: nn.Parameter, saved: Tensor, now: Tensor) -> Tensor:
    """Return the master `saved` where it rounds to the current value of `parameter`, else `now`.

    Both are fp32 masters. Loading an optimizer's state_dict must not change weights.
    """
    saved = saved.to(now.device, now.dtype)
    return torch.where(saved.to(parameter.dtype) == parameter.detach(), saved, now)


def _masters(optimizer: optim.Optimizer, state: Mapping[str, Any]) -> dict[nn.Parameter, Tensor]:
    return _by_parameter(optimizer, state, state.get(MASTERS, {}))


def _by_parameter(
    optimizer: optim.Optimizer, state: Mapping[str, Any], entries: Mapping[int, Any]
) -> dict[nn.Parameter, Any]:
    """Return a copy of `entries` whose keys, parameter numbers in `state`, became parameters."""
    by_parameter: dict[nn.Parameter, Any] = {}
    for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
        for parameter, number in zip(group["params"], saved["params"], strict=True):
            if number in entries:
                by_parameter[parameter] = entries[number]
    return by_parameter
