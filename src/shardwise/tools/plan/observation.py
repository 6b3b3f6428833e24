"""Observation: the state shared by all engines of an observed script."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from shardwise.config import Settings
from shardwise.tools.plan.engine_parts import ObservedParameter, recorded
from shardwise.tools.plan.record import (
    GroupRecord,
    LayerRecord,
    RoutedTokens,
    SequenceExchange,
    StepRecord,
    UnitUse,
)
from shardwise.tools.plan.step_recorder import StepRecorder


class SteppingEngine(Protocol):
    """The part of an engine's interface that an observation uses."""

    settings: Settings
    backwards: int
    stepped: bool

    @property
    def models(self) -> Sequence[nn.Module]: ...


@dataclass
class Observation:
    """The state shared by all engines of an observed script.

    It contains the recorder, the path of the record, and the data collected for it.
    """

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
    script_batch_size: int = 0
    """Batch size that the script passed to its last Loader, before `observer` overrode it."""
    accumulates: bool = False
    """Whether the training loop can split a step into several micro-batches."""
    buffer_bytes: int = 0
    written: bool = False
    tensor: int = 1
    """Number of tensor-parallel ranks. The first one is observed."""
    context: int = 1
    """Number of context-parallel ranks. The first one is observed."""
    method: str = ""
    """The `--context-method`."""
    spread: bool = False
    """Whether tensor parallelism leaves experts whole, and each rank routes a share of tokens."""
    exchanged: list[SequenceExchange] = field(default_factory=list)
    layers: list[LayerRecord] = field(default_factory=list)
    routed: list[RoutedTokens] = field(default_factory=list)
    pipelined: bool = False
    """Whether the loop calls engine.forward_backward."""
    disordered: str = ""
    """Name of a layer that ran before a layer defined earlier in the model, or ""."""

    current: ClassVar[Observation | None] = None

    @classmethod
    def begin(
        cls, path: Path, tensor: int, context: int = 1, method: str = "", *, spread: bool = False
    ) -> Observation:
        """Start recording, and make the new observation `current`."""
        # Operators receive both real tensors (the batch) and fake ones (parameters).
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        cls.current = cls(
            path,
            fake,
            StepRecorder(fake),
            tensor=tensor,
            context=context,
            method=method,
            spread=spread,
        )
        cls.current.recorder.__enter__()  # type: ignore[no-untyped-call]
        return cls.current


def finish(observation: Observation) -> None:
    """Write the record and exit the script with exit code 0."""
    recorder = observation.recorder
    recorder.active = False
    recorder.end()
    engine = observation.engines[0]
    StepRecord(
        operations=tuple(recorder.operations),
        # Storages can be freed in any order. Sorting makes the records of two batch sizes
        # comparable.
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
        routed=tuple(observation.routed),
        context=observation.context,
        exchanged=tuple(observation.exchanged),
    ).write(observation.path)
    observation.written = True
    # The record is complete, so running the rest of the script would only take time.
    raise SystemExit(0)


def _why_no_pipeline(observation: Observation) -> str:
    """Return the reason why the script cannot run with `--pipeline`, or "" if it can."""
    if len(observation.engines) > 1 or len(observation.engines[0].models) > 1:
        return "the script has several models, but a pipeline takes one"
    if observation.engines[0].settings.chunked_loss:
        return "--chunked-loss cannot be combined with it yet"
    if not observation.pipelined:
        return (
            "the loop calls engine.backward, which would run the stages one after the other; "
            "engine.forward_backward(...) runs them in parallel"
        )
    if observation.disordered:
        return f"{observation.disordered} runs before a layer that is defined earlier in the model"
    return ""
