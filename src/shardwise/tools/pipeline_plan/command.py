"""Times a script's layers for a few steps, and shows the best split into pipeline stages."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from shardwise.config import SCHEDULES
from shardwise.errors import LaunchError, ModelError
from shardwise.messages.printable import printable
from shardwise.net.python_command import python_words
from shardwise.parallel.pipeline import partition, schedule


@dataclass(frozen=True)
class TimedLayer:
    """A layer, its time per step in seconds, and the bytes that it sends to the next layer."""

    name: str
    parameters: int
    forward: float
    backward: float
    nbytes: float
    adds_parameters: bool
    """Whether it has a trainable parameter that is not shared with an earlier layer."""

    @property
    def time(self) -> float:
        """The total time per step of the forward and backward passes, in seconds."""
        return self.forward + self.backward


@dataclass(frozen=True)
class PipelinePlanRequest:
    """The arguments of `shardwise pipeline-plan`.

    Attributes:
        words: The script and its arguments.
        flags: Flags of `shardwise run`.
        pipeline: Number of pipeline ranks.
        microbatches: Number of micro-batches per step.
        steps: Number of steps to time.
    """

    words: tuple[str, ...]
    flags: tuple[str, ...]
    pipeline: int
    microbatches: int
    steps: int
    by: str
    """Quantity to balance between stages: "time" or "parameters"."""


def show_plan(request: PipelinePlanRequest) -> int:
    """Time the layers and show the stages. Return the exit code.

    Raises LaunchError if the script fails or completes no step, and ModelError if there are more
    stages than layers.
    """
    console = Console(highlight=False, markup=False)
    with console.status(f"timing {request.steps} steps on one worker"):
        layers = _time_layers(request)
    for table in tables(layers, request):
        console.print(table)
    for line in advice(layers, request):
        console.print(printable(line), soft_wrap=True)
    return 0


def _time_layers(request: PipelinePlanRequest) -> list[TimedLayer]:
    with tempfile.TemporaryDirectory(prefix="shardwise-pipeline-plan-") as folder:
        path, log = Path(folder) / "layers.json", Path(folder) / "log.txt"
        command = [
            *(*python_words("shardwise"), "run", "-n", "1", *request.flags),
            *("--time-layers", str(path), "--stop-after", str(request.steps), "--trial"),
            *request.words,
        ]
        with log.open("wb") as output:
            # Time the layers on one worker. They take the same time in a pipeline, and one worker
            # can run before the stages are known.
            code = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ,
                check=False,
            ).returncode
        if code or not path.exists():
            output_text = log.read_text(errors="replace").strip()[-3000:]
            why = f"failed (exit code {code})" if code else "made no step with an sw.Engine"
            raise LaunchError(
                f"{request.words[0]} {why}, so there are no layers to divide into stages. "
                f"Its output:\n{output_text}"
            )
        report: dict[str, Any] = json.loads(path.read_text())
    if not report["steps"]:
        raise LaunchError(
            f"{request.words[0]} made no step with an sw.Engine, so there are no layers to divide."
        )
    return [
        TimedLayer(
            each["name"],
            each["parameters"],
            each["forward"],
            each["backward"],
            each["bytes"],
            each["adds_parameters"],
        )
        for each in report["layers"]
    ]


def assign_layers(
    layers: Sequence[TimedLayer], request: PipelinePlanRequest, stages: int
) -> list[Sequence[TimedLayer]]:
    """Split the layers into balanced stages. Raises ModelError if there are too few layers."""
    if len(layers) < stages:
        raise ModelError(
            f"The model has {len(layers)} layer(s), which is fewer than {stages} stages. "
            f"Write --pipeline {len(layers)} or less, or name finer layers with --units."
        )
    sizes = [each.time if request.by == "time" else float(each.parameters) for each in layers]
    starts = partition.balanced_starts(sizes, stages)
    # The engine rejects a stage without trainable parameters.
    starts = partition.with_trainable_stages(starts, [each.adds_parameters for each in layers])
    return [[layers[n] for n in each] for each in partition.ranges_of(starts, len(layers))]


def tables(layers: Sequence[TimedLayer], request: PipelinePlanRequest) -> list[Table]:
    """Return a table of the stages, and a table of the idle time under each schedule."""
    assigned = assign_layers(layers, request, request.pipeline)
    total = sum(each.time for each in layers)
    stages = Table(
        title=f"{request.pipeline} stages, balanced in {request.by}",
        title_justify="left",
    )
    stages.add_column("stage")
    for heading in ("parameters", "forward ms", "backward ms", "of the time", "sends kB"):
        stages.add_column(heading, justify="right")
    for number, stage in enumerate(assigned):
        last = number == request.pipeline - 1
        # The size of a layer's output was recorded for the full batch, but a message contains one
        # micro-batch.
        sent = 0.0 if last else stage[-1].nbytes / request.microbatches
        stages.add_row(
            str(number),
            f"{sum(each.parameters for each in stage):,}",
            f"{sum(each.forward for each in stage) * 1e3:.1f}",
            f"{sum(each.backward for each in stage) * 1e3:.1f}",
            f"{sum(each.time for each in stage) / total:.0%}" if total else "-",
            f"{sent / 1e3:.1f}",
        )
    times = Table(
        title=f"idle time with {request.microbatches} micro-batches (communication left out)",
        title_justify="left",
    )
    times.add_column("--schedule")
    for heading in ("stages", "idle", "if all stages were equal"):
        times.add_column(heading, justify="right")
    for name in SCHEDULES:
        if (idle := idle_times(layers, request, name)) is not None:
            count, here, alike = idle
            times.add_row(name, str(count), f"{here:.1%}", f"{alike:.1%}")
    return [stages, times]


def idle_times(
    layers: Sequence[TimedLayer], request: PipelinePlanRequest, name: str
) -> tuple[int, float, float] | None:
    """Return the number of stages and the workers' idle fractions under schedule `name`.

    The first fraction is for the measured layers, and the second is for stages that all take the
    same time. Returns None if the schedule cannot be used.
    """
    stages = request.pipeline * (2 if name == "interleaved" else 1)
    # Some schedules need a multiple of the pipeline size. Require it for all of them, so that they
    # are compared with the same number of micro-batches.
    if len(layers) < stages or request.microbatches % request.pipeline:
        return None
    assigned = assign_layers(layers, request, stages)
    forward = [sum(each.forward for each in stage) for stage in assigned]
    backward = [sum(each.backward for each in stage) for stage in assigned]
    # Stages with equal times give a lower bound on the idle time of any split.
    alike = [sum(forward) / stages] * stages, [sum(backward) / stages] * stages
    here, best = (
        schedule.idle_fraction(
            name,
            request.pipeline,
            stages,
            request.microbatches,
            {"F": f, "B": b, "I": [x / 2 for x in b], "W": [x / 2 for x in b]},
        )
        for f, b in ((forward, backward), alike)
    )
    return stages, here, best


def advice(layers: Sequence[TimedLayer], request: PipelinePlanRequest) -> list[str]:
    """Return lines that list each stage's layers and the command that uses these stages."""
    # Print separate lines rather than a table column, because a narrow terminal would wrap the
    # names.
    assigned = assign_layers(layers, request, request.pipeline)
    lines = [
        f"stage {number}: {' to '.join(dict.fromkeys((stage[0].name, stage[-1].name)))}"
        for number, stage in enumerate(assigned)
    ]
    names = ",".join(stage[0].name for stage in assigned[1:])
    flags = ["--pipeline", str(request.pipeline), "--stages", names]
    flags += ["--microbatches", str(request.microbatches)]
    words = [*flags, *request.flags, *request.words]
    return [
        *lines,
        "In the loop, engine.forward_backward keeps all workers busy. With engine.backward they "
        "take turns (docs/parallel.md). To start the training:",
        f"  shardwise run -n {request.pipeline} {shlex.join(words)}",
    ]
