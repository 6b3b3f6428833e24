"""Optimizer state of parameters that are frozen for now: it stays with the user's optimizer, whole
on every rank, until they are trained again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor, nn, optim

from shardwise.engine.assembly import Recipe, States
from shardwise.states.optimizer_trial import Kind, examine, placed


@dataclass(frozen=True)
class Idle:
    """A parameter that `face` has in a group of `options`, and that is not trained now."""

    name: str
    parameter: nn.Parameter
    face: optim.Optimizer
    options: dict[str, Any]

    @cached_property
    def _kind(self) -> Kind:
        return examine(self.face, self.options, self.parameter.device)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """What is a tensor of its state, by key, as it is while the parameter is trained."""
        state = self._state
        if not state:
            return {}
        if self._kind.elementwise:
            return {key: state[key] for key in sorted(self._kind.tensor_keys) if key in state}
        return {k: v for k, v in state.items() if isinstance(v, Tensor) and v.ndim > 0}

    @property
    def numbers(self) -> dict[str, Any]:
        """What is one value each."""
        tensors = self.tensors
        return {k: v for k, v in self._state.items() if k not in tensors}

    @property
    def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = self.face.state.get(self.parameter, {})
        return state

    def take(self, state: Mapping[str, Any]) -> None:
        """Have `state` in place of what there is."""
        self.face.state.pop(self.parameter, None)
        if state:
            device = self.parameter.device
            self.face.state[self.parameter] = {
                key: placed(key, value, device, self.options) for key, value in state.items()
            }


def idle(recipe: Recipe, states: States) -> Iterator[Idle]:
    """All of them, in the order of the optimizers' groups."""
    trained = {tracked.parameter for tracked in states.parameters.tracked}
    names = {tracked.parameter: tracked.name for tracked in recipe.located()}
    for face in recipe.optimizers:
        for group in face.param_groups:
            for parameter in group["params"]:
                if parameter not in trained:
                    yield Idle(names[parameter], parameter, face, group)
