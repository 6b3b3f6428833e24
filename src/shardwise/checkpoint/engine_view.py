"""Declares what saving and loading use of an engine, which is a layer above this package.

The engine passes itself in: its EngineState is an `EngineView`, and its UserObjects `Objects`.
"""

from __future__ import annotations

from collections.abc import Set
from contextlib import AbstractContextManager
from typing import Protocol

from shardwise.checkpoint.attribute_values import OptimizerAttributes
from shardwise.checkpoint.extra_sets import ExtraSets
from shardwise.checkpoint.spec_view import SpecView, StatesView
from shardwise.model.buffers import Buffers
from shardwise.model.loss_scale import LossScale
from shardwise.world.world import World


class Objects(Protocol):
    """The user's models and optimizers in an engine."""

    buffers: Buffers
    attributes: OptimizerAttributes

    @property
    def states(self) -> StatesView: ...

    def check_passes(self) -> None:
        """Raise for an error in a forward that no step may follow."""

    def look_for_changes(self) -> None:
        """Take in what user code changed since the last call."""

    def make_room_for_averages(self, names: Set[str]) -> bool:
        """Add averages of frozen parameters; return whether the states were laid out again."""


class WeightingView(Protocol):
    """How the weights of losses are scaled."""

    @property
    def unit(self) -> float | None: ...
    @unit.setter
    def unit(self, value: float | None) -> None: ...


class EngineView(Protocol):
    """An engine and where its training is."""

    @property
    def world(self) -> World: ...
    @property
    def number(self) -> int: ...
    @property
    def steps(self) -> int: ...
    @property
    def spec(self) -> SpecView: ...
    @property
    def objects(self) -> Objects: ...
    @property
    def scale(self) -> LossScale: ...
    @property
    def weighting(self) -> WeightingView: ...

    @property
    def extra_sets(self) -> ExtraSets: ...

    @property
    def is_between_steps(self) -> bool:
        """Whether the engine can be saved now."""

    def refuse_in_step(self, call: str) -> None:
        """Raise UsageError unless `call` is between two steps."""

    def continue_at(self, steps: int) -> None:
        """Count on from `steps`, which a checkpoint has made."""

    def anchored(self) -> AbstractContextManager[None]:
        """Context manager: all groups of ranks have the same weights inside it."""
