"""Runs a script for a few steps, and shows how its layers are best shared out."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from shardwise.config import SCHEDULES
from shardwise.errors import LaunchError, ModelError
from shardwise.parallel.pipeline import partition, schedule
from shardwise.printable import printable


@dataclass(frozen=True)
class Layer:
    """A layer as it was timed: seconds of a step, and the bytes that it gives to the next."""

    name: str
    parameters: int
    forward: float
    backward: float
    nbytes: float
    fresh: bool
    """Whether it has a parameter to train that no layer before has."""

    @property
    def time(self) -> float:
        """Of forward and backward."""
        return self.forward + self.backward


@dataclass(frozen=True)
class Asked:
    """What is to be split: `words` are the script and its arguments, `flags` those of its run."""

    words: tuple[str, ...]
    flags: tuple[str, ...]
    pipeline: int
    microbatches: int
    steps: int
    by: str
    """"time" or "parameters"."""


def split(asked: Asked) -> int:
    """Time the layers and show the cut; returns the exit code.

    Raises LaunchError for a script that failed or trains nothing, ModelError for more stages than
    layers.
    """
    console = Console(highlight=False, markup=False)
    with console.status(f"timing {asked.steps} steps on one worker"):
        layers = _timed(asked)
    for table in tables(layers, asked):
        console.print(table)
    for line in advice(layers, asked):
        console.print(printable(line), soft_wrap=True)
    return 0


def _timed(asked: Asked) -> list[Layer]:
    with tempfile.TemporaryDirectory(prefix="shardwise-split-") as folder:
        path, log = Path(folder) / "layers.json", Path(folder) / "log.txt"
        command = [
            *(sys.executable, "-m", "shardwise", "run", "-n", "1", *asked.flags),
            *("--time-layers", str(path), "--stop-after", str(asked.steps), "--trial"),
            *asked.words,
        ]
        with log.open("wb") as output:
            code = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ,
                check=False,
            ).returncode
        if code or not path.exists():
            said = log.read_text(errors="replace").strip()[-3000:]
            why = f"failed (exit code {code})" if code else "made no step with an sw.Engine"
            raise LaunchError(
                f"{asked.words[0]} {why}, so there is nothing to split. It said:\n{said}"
            )
        told: dict[str, Any] = json.loads(path.read_text())
    if not told["steps"]:
        raise LaunchError(f"{asked.words[0]} made no step with an sw.Engine: nothing to split.")
    return [
        Layer(
            each["name"],
            each["parameters"],
            each["forward"],
            each["backward"],
            each["bytes"],
            each["fresh"],
        )
        for each in told["layers"]
    ]


def rows(layers: Sequence[Layer], asked: Asked, stages: int) -> list[Sequence[Layer]]:
    """The layers of each of `stages`. Raises ModelError where there are fewer layers."""
    if len(layers) < stages:
        raise ModelError(
            f"The model has {len(layers)} layer(s) to share out, fewer than {stages} stages: "
            f"write --pipeline {len(layers)} or less, or name finer ones with --units."
        )
    sizes = [each.time if asked.by == "time" else float(each.parameters) for each in layers]
    starts = partition.balanced(sizes, stages)
    starts = partition.with_something_to_train(starts, [each.fresh for each in layers])
    return [[layers[n] for n in each] for each in partition.rows_of(starts, len(layers))]


def tables(layers: Sequence[Layer], asked: Asked) -> list[Table]:
    """The stages, and what each schedule makes of them."""
    cut = rows(layers, asked, asked.pipeline)
    total = sum(each.time for each in layers)
    stages = Table(title=f"{asked.pipeline} stages, alike in {asked.by}", title_justify="left")
    for heading in ("stage", "layers"):
        stages.add_column(heading, overflow="fold")
    for heading in ("parameters", "forward ms", "backward ms", "of the time", "sends kB"):
        stages.add_column(heading, justify="right")
    for number, several in enumerate(cut):
        last = number == asked.pipeline - 1
        sent = 0.0 if last else several[-1].nbytes / asked.microbatches
        stages.add_row(
            str(number),
            printable(_span(several)),
            f"{sum(each.parameters for each in several):,}",
            f"{sum(each.forward for each in several) * 1e3:.1f}",
            f"{sum(each.backward for each in several) * 1e3:.1f}",
            f"{sum(each.time for each in several) / total:.0%}" if total else "-",
            f"{sent / 1e3:.1f}",
        )
    times = Table(
        title=f"waiting, of {asked.microbatches} micro-batches (sending left out)",
        title_justify="left",
    )
    times.add_column("--schedule")
    for heading in ("stages", "waits", "were all stages alike"):
        times.add_column(heading, justify="right")
    for name in SCHEDULES:
        if (found := waits(layers, asked, name)) is not None:
            count, here, alike = found
            times.add_row(name, str(count), f"{here:.1%}", f"{alike:.1%}")
    return [stages, times]


def _span(layers: Sequence[Layer]) -> str:
    """A row of layers by name."""
    return layers[0].name if len(layers) == 1 else f"{layers[0].name} to {layers[-1].name}"


def waits(layers: Sequence[Layer], asked: Asked, name: str) -> tuple[int, float, float] | None:
    """Stages, and the part of the time that workers wait by schedule `name`, as the layers are and
    were they alike; None where the model has too few layers or the schedule is not possible."""
    stages = asked.pipeline * (2 if name == "interleaved" else 1)
    if len(layers) < stages or asked.microbatches % asked.pipeline:
        return None
    cut = rows(layers, asked, stages)
    forward = [sum(each.forward for each in several) for several in cut]
    backward = [sum(each.backward for each in several) for several in cut]
    alike = [sum(forward) / stages] * stages, [sum(backward) / stages] * stages
    here, best = (
        schedule.bubble(
            name,
            asked.pipeline,
            stages,
            asked.microbatches,
            {"F": f, "B": b, "I": [x / 2 for x in b], "W": [x / 2 for x in b]},
        )
        for f, b in ((forward, backward), alike)
    )
    return stages, here, best


def advice(layers: Sequence[Layer], asked: Asked) -> list[str]:
    """The line that starts it so."""
    cut = rows(layers, asked, asked.pipeline)
    names = ",".join(several[0].name for several in cut[1:])
    flags = ["--pipeline", str(asked.pipeline), "--stages", names]
    flags += ["--microbatches", str(asked.microbatches)]
    return [
        "engine.forward_backward in the loop keeps all workers busy; with engine.backward they "
        "take turns (docs/parallel.md). To start it so:",
        f"  shardwise run -n {asked.pipeline} {shlex.join([*flags, *asked.flags, *asked.words])}",
    ]
