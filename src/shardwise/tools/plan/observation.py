"""Observation is what the engines of a script have in common: one recorder, and what was seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from shardwise.config import Settings
from shardwise.tools.plan.engine_parts import ObservedParameter, recorded
from shardwise.tools.plan.record import GroupRecord, LayerRecord, StepRecord, UnitUse
from shardwise.tools.plan.step_recorder import StepRecorder


class SteppingEngine(Protocol):
    """What an observation asks of an engine: what it trains, its settings, and how far its first
    step has come."""

    settings: Settings
    backwards: int
    stepped: bool

    @property
    def models(self) -> Sequence[nn.Module]: ...


@dataclass
class Observation:
    """What all engines of the script have in common: one recorder, and the file for the record."""

    path: Path
    fake: FakeTensorMode
    recorder: StepRecorder
    engines: list[SteppingEngine] = field(default_factory=list)
    uses: list[UnitUse] = field(default_factory=list)
    units: list[str] = field(default_factory=list)
    groups: list[GroupRecord] = field(default_factory=list)
    parameters: list[ObservedParameter] = field(default_factory=list)
    first_backward: int = -1
    batch: Any = None
    samples: int = 0
    total: int = 0
    asked: int = 0
    """The batch size that the script gave its last Loader, which may have been given another."""
    accumulates: bool = False
    """Whether its loop takes a step in several micro-batches."""
    buffer_bytes: int = 0
    written: bool = False
    tensor: int = 1
    """How many tensor-parallel ranks the observed one is the first of."""
    layers: list[LayerRecord] = field(default_factory=list)
    pipelined: bool = False
    """Whether its loop gives batches to engine.forward_backward."""
    disordered: str = ""
    """A layer that ran before one that stands earlier in the model."""

    current: ClassVar[Observation | None] = None

    @classmethod
    def begin(cls, path: Path, tensor: int) -> Observation:
        """Observe from now on."""
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        cls.current = cls(path, fake, StepRecorder(fake), tensor=tensor)
        cls.current.recorder.__enter__()  # type: ignore[no-untyped-call]
        return cls.current


def finish(observation: Observation) -> None:
    """Write the record, and end the script with success."""
    recorder = observation.recorder
    recorder.active = False
    recorder.end()
    engine = observation.engines[0]
    StepRecord(
        operations=tuple(recorder.operations),
        tensors=tuple(sorted(recorder.tensors, key=lambda each: (each.born, each.died))),
        parameters=tuple(map(recorded, observation.parameters)),
        groups=tuple(observation.groups),
        units=tuple(observation.units),
        uses=tuple(observation.uses),
        batch_size=observation.samples,
        total_batch=observation.total,
        backward=observation.first_backward,
        precision=engine.settings.precision,
        activations=engine.settings.activations,
        accumulates=observation.accumulates,
        assumed=tuple(recorder.assumed),
        buffer_bytes=observation.buffer_bytes,
        tensor=observation.tensor,
        layers=tuple(observation.layers),
        no_pipeline=_why_no_pipeline(observation),
    ).write(observation.path)
    observation.written = True
    raise SystemExit(0)


def _why_no_pipeline(observation: Observation) -> str:
    """What of the script excludes `--pipeline`; empty where nothing does."""
    if len(observation.engines) > 1 or len(observation.engines[0].models) > 1:
        return "there are several models, and a pipeline takes one"
    if not observation.pipelined:
        return (
            "the loop calls engine.backward, which would run stage after stage: "
            "engine.forward_backward(...) in its place has all of them work"
        )
    if observation.disordered:
        return f"{observation.disordered} runs before a layer that stands earlier in the model"
    return ""
