"""Makes a plain state_dict of an engine's optimizer state, and gives one to a user's optimizer.

What a plain optimizer does not have stands beside what torch knows, which takes `state` and
`param_groups` out of a state_dict and leaves the rest alone:

    state                {0: {"step": ..., "exp_avg": ...}, ...}
    param_groups         [{"lr": ..., "params": [0, ...]}, ...]
    fp32_master_weights  {0: ..., ...}, where parameters are of 16 bits
    fp32_gradients       whether gradients of 16-bit parameters are summed up in fp32: they are
                         since a step of several backwards
    loss_weight_divisor  for a resume: what backward divides the weights of losses by, where these
                         are not all 1: the update makes up for it, but for how sums are rounded
    attributes           what the optimizer keeps in attributes that its steps change, and the
                         optimizer that it wraps: see `attribute_values`

In `state` torch would round masters to 16 bits, keep them for good, and take a parameter that has
nothing else there for one that was updated before.
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
from shardwise.model.precision import NARROW, widened_state
from shardwise.states.optimizer.optimizer_kind import common_state, placed, state_shape

MASTERS = "fp32_master_weights"
WIDE = "fp32_gradients"
DIVISOR = "loss_weight_divisor"
ATTRIBUTES = "attributes"


def only(spec: EngineSpec, optimizer: optim.Optimizer | None) -> optim.Optimizer:
    """`optimizer`, or the only one. Raises UsageError where there are several, or for another."""
    if optimizer is None and len(spec.optimizers) != 1:
        raise UsageError("This engine has several optimizers: say which.")
    if optimizer is not None and not any(optimizer is each for each in spec.optimizers):
        raise UsageError(f"This {type(optimizer).__name__} is not one that this engine has.")
    return spec.optimizers[0] if optimizer is None else optimizer


def make(
    spec: EngineSpec,
    states: States,
    optimizer: optim.Optimizer,
    unit: float | None,
    resting: Mapping[nn.Parameter, Tensor],
) -> dict[str, Any]:
    """See Engine.optimizer_state_dict; `unit` is what weights are divided by, where it matters, and
    `resting` has masters of parameters that are frozen for now."""
    # A parameter that was frozen on the way has left its state with the user's optimizer.
    whole = _whole(spec, optimizer, {**held(optimizer), **states.gathering.optimizer_state()})
    wide = {p: {MASTERS: master} for p, master in _masters_now(states).items()}
    known = _whole(spec, optimizer, wide) | {p: {MASTERS: kept} for p, kept in resting.items()}
    numbers: dict[nn.Parameter, int] = {}
    groups = []
    for group in optimizer.param_groups:
        members = [numbers.setdefault(p, len(numbers)) for p in group["params"]]
        groups.append({**group, "params": members})
    states.optimizer.return_common_state()
    own = {number: whole[p] for p, number in numbers.items() if p in whole}
    made: dict[str, Any] = {
        "state": own | common_state(held(optimizer)),
        "param_groups": groups,
    }
    found = {number: known[p][MASTERS] for p, number in numbers.items() if p in known}
    if found:
        made |= {MASTERS: found, WIDE: states.gradients.wide}
    return made if unit is None else made | {DIVISOR: unit}


def _masters_now(states: States) -> dict[nn.Parameter, Tensor]:
    """By parameter of 16 bits its master; what user code has written is taken in by the next step,
    and stands here as it is. Collective."""
    found = states.gathering.wide_masters()
    # Sharded parameters are written in full_parameters alone, at whose end masters follow.
    for index in states.parameters.written() if states.shown is None else ():
        parameter = states.parameters.named[index].parameter
        if parameter in found:
            found[parameter] = parameter.detach().float()
    return found


def _whole(
    spec: EngineSpec, optimizer: optim.Optimizer, held: dict[Any, dict[str, Any]]
) -> dict[Any, dict[str, Any]]:
    """`held` by parameter, of all layers and of whole tensors, where a replica has its model in
    parts. Collective."""
    if spec.pipeline is not None:
        held = held | spec.pipeline.ownership.states_of_others(held, spec.optimizers)
    if spec.tensor is not None:
        order = [p for group in optimizer.param_groups for p in group["params"] if p in held]
        held = {p: spec.tensor.whole_state(p, held[p]) for p in order}
    return held


def misfit(optimizer: optim.Optimizer, state: Mapping[str, Any]) -> str | None:
    """Why `state` is none of an optimizer with the same groups over tensors of the same shapes."""
    name = type(optimizer).__name__
    if not {"state", "param_groups"} <= set(state):
        return (
            f"This is no state_dict of an optimizer, which has state and param_groups: it has "
            f"{', '.join(map(str, state)) or 'nothing'}."
        )
    theirs = [len(group["params"]) for group in state["param_groups"]]
    ours = [len(group["params"]) for group in optimizer.param_groups]
    if theirs != ours:
        return (
            f"This state_dict has parameter groups of {theirs} parameters, and {name} has {ours}. "
            "Build the optimizer over the same parameters, in the same groups."
        )
    return _odd_beside(optimizer, state) or _odd_state(optimizer, state)


def _odd_beside(optimizer: optim.Optimizer, state: Mapping[str, Any]) -> str | None:
    """What is wrong with what stands in `state` beside what torch knows."""
    unit = state.get(DIVISOR, 1.0)
    if not isinstance(unit, int | float) or not 0 < unit < math.inf:
        return (
            f"{DIVISOR} is {unit!r} in this state_dict, where engine.optimizer_state_dict() has a "
            "number above 0: leave the key out, or its number as it was."
        )
    for parameter, master in _masters(optimizer, state).items():
        shape = tuple(master.shape) if isinstance(master, Tensor) else None
        if shape != tuple(parameter.shape):
            found = type(master).__name__ if shape is None else f"tensor of shape {shape}"
            return (
                f"{MASTERS} has a {found} in this state_dict, for a parameter of shape "
                f"{tuple(parameter.shape)}: it is another model's."
            )
    return None


def _odd_state(optimizer: optim.Optimizer, state: Mapping[str, Any]) -> str | None:
    """Which tensor of `state` has the shape of another model's."""
    name = type(optimizer).__name__
    for parameter, entries in _by_parameter(optimizer, state, state["state"]).items():
        for key, value in entries.items():
            if not isinstance(value, Tensor) or not value.ndim:
                continue
            known = state_shape(type(optimizer), key, parameter.shape)
            if known is not None and tuple(value.shape) != known:
                return (
                    f"{key} of a parameter of shape {tuple(parameter.shape)} has the shape "
                    f"{tuple(value.shape)} in this state_dict, where {name} has {known}: it is "
                    "another model's."
                )
    return None


def give(optimizer: optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Let `optimizer` have the options and the state of `state`, in the dtypes that these have; in
    fp32 what a plain optimizer has kept in the 16 bits of a parameter."""
    for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
        group.update({k: v for k, v in saved.items() if k not in ("params", "param_names")})
    options = {p: group for group in optimizer.param_groups for p in group["params"]}
    taken = {
        parameter: {
            key: placed(key, value, parameter.device, options[parameter])
            for key, value in entries.items()
        }
        for parameter, entries in _as_updated(optimizer, state).items()
    }
    common = {k: v for k, v in state["state"].items() if k not in _numbers_in(state)}
    held(optimizer).clear()
    held(optimizer).update(taken | common)


def _as_updated(
    optimizer: optim.Optimizer, state: Mapping[str, Any]
) -> dict[nn.Parameter, dict[str, Any]]:
    """What `state` has by parameter, in the dtypes in which updates are made here."""
    mastered = _masters(optimizer, state)
    return {
        parameter: entries if parameter in mastered else widened_state(parameter, entries)
        for parameter, entries in _by_parameter(optimizer, state, state["state"]).items()
    }


def numbers(state: Mapping[str, Any]) -> tuple[bool, float | None]:
    """Whether gradients are summed up in fp32, and what weights are divided by, where `state`
    says it."""
    return bool(state.get(WIDE)), state.get(DIVISOR)


def refine(
    known: dict[nn.Parameter, Tensor], optimizer: optim.Optimizer, state: Mapping[str, Any]
) -> dict[nn.Parameter, Tensor]:
    """Put the masters of `state` into `known`; returns those of parameters that are frozen now."""
    saved = _masters(optimizer, state)
    for parameter in saved.keys() & known.keys():
        known[parameter] = _finer(parameter, saved[parameter], known[parameter])
    narrow = [p for p in saved if p.dtype in NARROW]
    return {p: saved[p] for p in narrow if not p.requires_grad}


def thawed(resting: dict[nn.Parameter, Tensor]) -> dict[nn.Parameter, Tensor]:
    """Take the masters of parameters that are trained again out of `resting`."""
    trained = [parameter for parameter in resting if parameter.requires_grad]
    return {p: _finer(p, resting.pop(p), p.detach().float()) for p in trained}


def _finer(parameter: nn.Parameter, saved: Tensor, now: Tensor) -> Tensor:
    """The master `saved` wherever it rounds to what the parameter holds, elsewhere the one of
    `now`: a state_dict of an optimizer changes no weights."""
    saved = saved.to(now.device, now.dtype)
    return torch.where(saved.to(parameter.dtype) == parameter.detach(), saved, now)


def _numbers_in(state: Mapping[str, Any]) -> set[int]:
    return {number for group in state["param_groups"] for number in group["params"]}


def _masters(optimizer: optim.Optimizer, state: Mapping[str, Any]) -> dict[nn.Parameter, Tensor]:
    return _by_parameter(optimizer, state, state.get(MASTERS, {}))


def _by_parameter(
    optimizer: optim.Optimizer, state: Mapping[str, Any], entries: Mapping[int, Any]
) -> dict[nn.Parameter, Any]:
    """What `entries` have by the numbers of parameters in `state`."""
    found: dict[nn.Parameter, Any] = {}
    for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
        for parameter, number in zip(group["params"], saved["params"], strict=True):
            if number in entries:
                found[parameter] = entries[number]
    return found
