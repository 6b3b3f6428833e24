"""Defines protocols for the parts of an engine that saving and loading use.

The engine is in a higher layer that this package must not import, so it passes its objects in.
EngineState implements `EngineView`, and UserObjects implements `Objects`.
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
    """The user's models and optimizers in an engine, with their states."""

    buffers: Buffers
    attributes: OptimizerAttributes

    @property
    def states(self) -> StatesView: ...

    def check_passes(self) -> None:
        """Raise an error if a forward pass failed in a way that rules out a step."""

    def look_for_changes(self) -> None:
        """Detect and apply the changes that user code has made since the last call."""

    def renew_copies(self) -> None:
        """Make the second copies of optimizer state equal to their originals, after a load."""

    def make_room_for_averages(self, names: Set[str]) -> bool:
        """Add moving averages for the frozen parameters in `names`.

        Returns whether the layout of the states has changed.
        """


class WeightingView(Protocol):
    """The scaling of loss weights."""

    @property
    def unit(self) -> float | None: ...
    @unit.setter
    def unit(self, value: float | None) -> None: ...


class EngineView(Protocol):
    """An engine and the progress of its run."""

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
        """True if the engine can be saved now."""

    def refuse_in_step(self, call: str) -> None:
        """Raise UsageError if a step is in progress. The message names the user's call, `call`."""

    def continue_at(self, steps: int) -> None:
        """Set the step counter to `steps`, the step of a loaded checkpoint."""

    def anchored(self) -> AbstractContextManager[None]:
        """Return a context manager that gives all groups of ranks the same weights inside it."""
