"""Defines the fields of checkpoint.json that record an engine's progress, one class per field.

To add a field, write a class here, add it to FIELDS, and add its check to schema.OPTIONAL (not to
schema.FIELDS, because older checkpoints lack the field). Tracked objects, tensors and optimizers
have their own modules: tracking.py, tensors.py and optimizer_fields.py.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwise.checkpoint.engine_view import EngineView
from shardwise.errors import BrokenCheckpoint
from shardwise.world.generator_states import GeneratorStates


class EngineField(ABC):
    """A field of checkpoint.json that an engine saves and restores."""

    name: str

    @abstractmethod
    def value(self, engine: EngineView) -> Any:
        """Return the JSON value to save, or None to omit the field."""

    def parse(self, path: Path, saved: Any) -> Any:
        """Convert a saved value to the form that `restore` expects.

        Loading parses all fields before it changes anything. Raises BrokenCheckpoint for a value
        that a save never writes. By default, returns the value unchanged.
        """
        del path
        return saved

    @abstractmethod
    def restore(self, engine: EngineView, parsed: Any) -> None:
        """Restore the engine's state from a value that `parse` returned."""


class _Seed(EngineField):
    name = "seed"

    def value(self, engine: EngineView) -> int:
        return engine.world.seed

    def restore(self, engine: EngineView, parsed: int | None) -> None:
        """Use the saved seed, unless the user has chosen one for this run."""
        chosen = engine.world.settings.seed
        if parsed is None:  # a DeepSpeed checkpoint has no seed
            return
        # A seed from --seed or sw.init(seed=...) takes precedence, because the user may want a
        # different data order.
        if chosen is None:
            engine.world.seed = parsed
        elif chosen != parsed:
            engine.world.say_once(
                f"this run has seed {chosen} and the checkpoint has seed {parsed}, so data order "
                "and dropout differ from the run that saved it. To keep them, write "
                f"--seed {parsed}."
            )


class _Scaling(EngineField):
    """The loss scale, the unit of the loss weights, and whether gradients are reduced in fp32."""

    name = "scaling"

    def value(self, engine: EngineView) -> dict[str, Any]:
        wide = engine.objects.states.gradients.wide
        return engine.scale.state() | {"unit": engine.weighting.unit, "wide": wide}

    def restore(self, engine: EngineView, parsed: Mapping[str, Any]) -> None:
        # Without the saved loss scale, a resumed fp16 run might skip steps to find it again.
        engine.scale.restore(parsed)
        engine.weighting.unit = parsed["unit"]
        # If the run had switched to fp32 sums, switch too, so that the results are bit-identical.
        if parsed["wide"] and engine.spec.settings.reduce_dtype == "fp32":
            engine.objects.states.gradients.widen()


class _Draws(EngineField):
    """The position in the random stream that all ranks share."""

    name = "draws"

    def value(self, engine: EngineView) -> dict[str, Any] | None:
        return engine.world.draws.state()

    def parse(self, path: Path, saved: Any) -> GeneratorStates:
        try:
            return GeneratorStates.of_plain(saved)
        except (ValueError, KeyError, TypeError, struct.error) as error:
            raise BrokenCheckpoint(
                f"{path} has an invalid state of the random generators ({type(error).__name__}: "
                f"{error}). Use another checkpoint."
            ) from error

    def restore(self, engine: EngineView, parsed: GeneratorStates) -> None:
        engine.world.draws.restore(parsed)


SCALING = _Scaling()
FIELDS: tuple[EngineField, ...] = (_Seed(), SCALING, _Draws())


def values(engine: EngineView) -> dict[str, Any]:
    """Return the values of all fields to save, by field name."""
    found = {field.name: field.value(engine) for field in FIELDS}
    return {name: value for name, value in found.items() if value is not None}


def parse(path: Path, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parsed values of `fields`, for `restore`.

    Raises BrokenCheckpoint if a field has a value that a save never writes.
    """
    return {
        field.name: field.parse(path, fields[field.name])
        for field in FIELDS
        if field.name in fields
    }


def restore(engine: EngineView, parsed: Mapping[str, Any]) -> None:
    """Restore the values in `parsed`. Fields that the checkpoint lacks keep their values."""
    for field in FIELDS:
        if field.name in parsed:
            field.restore(engine, parsed[field.name])
