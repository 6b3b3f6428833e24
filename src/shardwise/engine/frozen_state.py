"""Gives a checkpoint the optimizer state of parameters that are frozen for now.

It stays with the user's optimizer, whole on every rank, until they are trained again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor, nn, optim

from shardwise.engine.build import States
from shardwise.engine.engine_spec import EngineSpec
from shardwise.model.optimizer_access import held
from shardwise.states.optimizer.optimizer_kind import OptimizerKind, placed
from shardwise.states.optimizer.optimizer_trial import examine


class _Group:
    """A parameter group of an optimizer; what kind it is costs a trial, made once when asked."""

    def __init__(self, optimizer: optim.Optimizer, options: dict[str, Any]) -> None:
        self.optimizer = optimizer
        self.options = options

    @cached_property
    def kind(self) -> OptimizerKind:
        """As the group's first parameter is updated."""
        device = self.options["params"][0].device
        return examine(self.optimizer, self.options, device, is_copied=False)


@dataclass(frozen=True)
class FrozenState:
    """A parameter that a group of an optimizer has, and that is not trained now."""

    name: str
    parameter: nn.Parameter
    group: _Group

    @property
    def tensors(self) -> dict[str, Tensor]:
        """What is a tensor of its state, by key, as it is while the parameter is trained."""
        state = self._state
        if not state:
            return {}
        kind, shape = self.group.kind, self.parameter.shape
        return {k: v for k, v in sorted(state.items()) if kind.is_tensor(k, v, shape)}

    @property
    def numbers(self) -> dict[str, Any]:
        """What is one value each."""
        tensors = self.tensors
        return {k: v for k, v in self._state.items() if k not in tensors}

    @property
    def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = held(self.group.optimizer).get(self.parameter, {})
        return state

    def take(self, state: Mapping[str, Any]) -> None:
        """Have `state` in place of what there is."""
        held(self.group.optimizer).pop(self.parameter, None)
        if state:
            device = self.parameter.device
            held(self.group.optimizer)[self.parameter] = {
                key: placed(key, value, device, self.group.options) for key, value in state.items()
            }


def idle(spec: EngineSpec, states: States) -> Iterator[FrozenState]:
    """All of them, in the order of the optimizers' groups."""
    trained = {named.parameter for named in states.parameters.named}
    names = {named.parameter: named.name for named in spec.located()}
    for optimizer in spec.optimizers:
        for group in (_Group(optimizer, options) for options in optimizer.param_groups):
            for parameter in group.options["params"]:
                if parameter not in trained and spec.is_here(parameter):
                    yield FrozenState(names[parameter], parameter, group)
