"""Defines protocols for the parts of an engine that saving and loading use.

The engine is in a higher layer, which this package must not import. EngineState implements
`EngineView`, and UserObjects implements `Objects`.
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
        """Raise an error if a failed forward pass makes it impossible to complete a step."""

    def look_for_changes(self) -> None:
        """Detect and apply the changes that user code has made since the last call."""

    def renew_copies(self) -> None:
        """Update the second copies of optimizer state from the originals, after loading."""

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
        """Whether no step is in progress, so that the engine can be saved."""

    def refuse_on_waiting_spare(self, call: str) -> None:
        """Raise UsageError for `call`, which writes files, on a spare that has not joined yet."""

    def refuse_in_step(self, call: str) -> None:
        """Raise UsageError if a step is in progress. The message names the user's call, `call`."""

    def continue_at(self, steps: int) -> None:
        """Set the step counter to `steps`, after loading."""

    def anchored(self) -> AbstractContextManager[None]:
        """Return a context manager within which all groups of ranks have the same weights."""
