"""Saves and restores where training is: one class for each such field of checkpoint.json.

To add a field, write a class here, put it into FIELDS, and add its check to schema.OPTIONAL, since
older checkpoints lack it. Objects that users track, tensors and optimizers have modules of their
own: tracking.py, tensors.py, optimizer_fields.py.
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
        """Return the value to save, as JSON; None leaves the field out."""

    def parse(self, path: Path, saved: Any) -> Any:
        """Return the value in the form that `restore` takes.

        A load parses all fields before it changes anything. Raises BrokenCheckpoint for a value
        that no save has written.
        """
        del path
        return saved

    @abstractmethod
    def restore(self, engine: EngineView, parsed: Any) -> None:
        """Continue from a value."""


class _Seed(EngineField):
    name = "seed"

    def value(self, engine: EngineView) -> int:
        return engine.world.seed

    def restore(self, engine: EngineView, parsed: int | None) -> None:
        """Continue with the seed that was drawn, unless this run has chosen one."""
        chosen = engine.world.settings.seed
        if parsed is None:  # a save of DeepSpeed has none
            return
        # A seed of --seed or sw.init(seed=...) wins: the user may want other data order.
        if chosen is None:
            engine.world.seed = parsed
        elif chosen != parsed:
            engine.world.say_once(
                f"this run has the seed {chosen} and the checkpoint {parsed}: data order and "
                f"dropout are not those of the run that wrote it. Write --seed {parsed} for those."
            )


class _Scaling(EngineField):
    """The loss scale, the unit of loss weights, and whether gradients are summed in fp32."""

    name = "scaling"

    def value(self, engine: EngineView) -> dict[str, Any]:
        wide = engine.objects.states.gradients.wide
        return engine.scale.state() | {"unit": engine.weighting.unit, "wide": wide}

    def restore(self, engine: EngineView, parsed: Mapping[str, Any]) -> None:
        engine.scale.restore(parsed)
        engine.weighting.unit = parsed["unit"]
        if parsed["wide"] and engine.spec.settings.reduce_dtype == "fp32":
            engine.objects.states.gradients.widen()


class _Draws(EngineField):
    """Position of the random stream that all ranks draw from in common."""

    name = "draws"

    def value(self, engine: EngineView) -> dict[str, Any] | None:
        return engine.world.draws.state()

    def parse(self, path: Path, saved: Any) -> GeneratorStates:
        try:
            return GeneratorStates.of_plain(saved)
        except (ValueError, KeyError, TypeError, struct.error) as error:
            raise BrokenCheckpoint(
                f"{path} does not tell where draws go on ({type(error).__name__}: {error}). Take "
                "another checkpoint."
            ) from error

    def restore(self, engine: EngineView, parsed: GeneratorStates) -> None:
        engine.world.draws.restore(parsed)


SCALING = _Scaling()
FIELDS: tuple[EngineField, ...] = (_Seed(), SCALING, _Draws())


def values(engine: EngineView) -> dict[str, Any]:
    """Return the fields of `engine` that are saved."""
    found = {each.name: each.value(engine) for each in FIELDS}
    return {name: value for name, value in found.items() if value is not None}


def parse(path: Path, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that `fields` has, ready for `restore`. Raises BrokenCheckpoint."""
    return {
        each.name: each.parse(path, fields[each.name]) for each in FIELDS if each.name in fields
    }


def restore(engine: EngineView, parsed: Mapping[str, Any]) -> None:
    """Continue from `parsed` values; a field that the checkpoint lacks stays as it is."""
    for each in FIELDS:
        if each.name in parsed:
            each.restore(engine, parsed[each.name])
