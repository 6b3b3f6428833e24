"""Fields of checkpoint.json that record how far training is; one class per field.

To add a field, write a class here, put it into FIELDS, and add its check to schema.OPTIONAL,
because older checkpoints lack it. Tracked objects, tensors and optimizers have their own modules:
tracking.py, tensors.py, optimizer_fields.py.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwise.checkpoint.engine_view import EngineView
from shardwise.errors import BrokenCheckpoint
from shardwise.world.randomness import GeneratorStates


class EngineField(ABC):
    """A field of checkpoint.json that an engine saves and restores."""

    name: str

    @abstractmethod
    def value(self, engine: EngineView) -> Any:
        """Return the value to save, as JSON; None omits the field."""

    def parse(self, path: Path, saved: Any) -> Any:
        """Return the value in the form that `restore` takes.

        A load parses all fields before it changes anything. Raises BrokenCheckpoint for a value
        that no save writes.
        """
        del path
        return saved

    @abstractmethod
    def restore(self, engine: EngineView, parsed: Any) -> None:
        """Restore the engine from a parsed value."""


class _Seed(EngineField):
    name = "seed"

    def value(self, engine: EngineView) -> int:
        return engine.world.seed

    def restore(self, engine: EngineView, parsed: int | None) -> None:
        """Use the saved seed, unless this run has its own."""
        chosen = engine.world.settings.seed
        if parsed is None:  # a DeepSpeed checkpoint has no seed
            return
        # A seed from --seed or sw.init(seed=...) wins: the user may want another data order.
        if chosen is None:
            engine.world.seed = parsed
        elif chosen != parsed:
            engine.world.say_once(
                f"this run has seed {chosen} and the checkpoint has seed {parsed}, so data order "
                "and dropout differ from the run that saved it. To keep them, write "
                f"--seed {parsed}."
            )


class _Scaling(EngineField):
    """Loss scale, unit of loss weights, and whether gradients are reduced in fp32."""

    name = "scaling"

    def value(self, engine: EngineView) -> dict[str, Any]:
        wide = engine.objects.states.gradients.wide
        return engine.scale.state() | {"unit": engine.weighting.unit, "wide": wide}

    def restore(self, engine: EngineView, parsed: Mapping[str, Any]) -> None:
        engine.scale.restore(parsed)
        engine.weighting.unit = parsed["unit"]
        # A sum that was widened during the run stays wide, so that a resume has the same bits.
        if parsed["wide"] and engine.spec.settings.reduce_dtype == "fp32":
            engine.objects.states.gradients.widen()


class _Draws(EngineField):
    """Position of the common random stream, which all ranks draw from."""

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
    """Return the fields to save."""
    found = {field.name: field.value(engine) for field in FIELDS}
    return {name: value for name, value in found.items() if value is not None}


def parse(path: Path, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parsed values of `fields`, for `restore`. Raises BrokenCheckpoint."""
    return {
        field.name: field.parse(path, fields[field.name])
        for field in FIELDS
        if field.name in fields
    }


def restore(engine: EngineView, parsed: Mapping[str, Any]) -> None:
    """Restore `parsed` values; fields that the checkpoint lacks are not changed."""
    for field in FIELDS:
        if field.name in parsed:
            field.restore(engine, parsed[field.name])
