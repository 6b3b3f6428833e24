"""Runs a script once, recorded, and reads what it recorded."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardwise.launch import program
from shardwise.launch.resources import usable_cores
from shardwise.tensor_log import WANTED
from shardwise.verify import records
from shardwise.verify.placements import Placement
from shardwise.verify.records import Training

SHIM = "shardwise.verify.script"
RECORDS = "record-"
"""What the names of folders begin with that runs record into."""

OnStep = Callable[[int], None]


@dataclass(frozen=True, kw_only=True)
class Script:
    """What is run: its words, and whether the first is a module."""

    words: tuple[str, ...]
    module: bool = False


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run to make: of `script`, spread by `placement`, or where that is None by itself.

    `alter` says what is changed about it (alterations.py), by name; `values` of which tensors the
    values are recorded, where not of all small ones; `environ` goes to the processes.
    """

    script: Script
    placement: Placement | None
    steps: int
    alter: Mapping[str, Any] = field(default_factory=dict)
    values: Sequence[str] | None = None
    environ: Mapping[str, str] = field(default_factory=dict)
    precision: str = "fp32"
    """For what trains without an engine."""
    most: int = 1
    """The largest number of ranks of all runs, which share the cores alike."""


class RunFailed(Exception):
    """A run that ended with another code than 0; `output` is all that it wrote."""

    def __init__(self, name: str, code: int, output: str) -> None:
        super().__init__(f"{name} ended with exit code {code}: {last_words(output)}")
        self.code = code
        self.output = output


def last_words(output: str) -> str:
    """The last line: the launcher shows the error that ended a run last."""
    lines = [line.strip() for line in output.splitlines()]
    return next((line for line in reversed(lines) if line), "it said nothing")


def make(run: Run, name: str, log: Path, on_step: OnStep) -> Training:
    """Make the run called `name`, all its output going to `log`. Raises RunFailed; ended by Ctrl-C
    it ends its ranks first. What was recorded is removed in any case."""
    folder = Path(tempfile.mkdtemp(prefix=RECORDS, dir=log.parent))
    try:
        if run.values is not None:
            (folder / WANTED).write_text(json.dumps({"names": list(run.values)}))
        with log.open("wb") as output:
            process = subprocess.Popen(
                command(run, folder),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=_environment(run),
            )
            code = program.wait_for(process, lambda: on_step(records.steps_made(folder)))
        if code:
            raise RunFailed(name, code, log.read_text(errors="replace"))
        return records.read(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def command(run: Run, folder: Path) -> list[str]:
    """The words that make a run, which records into `folder`."""
    where = str(folder.resolve())
    given = {
        "record": where,
        "steps": run.steps,
        "module": run.script.module,
        "alter": dict(run.alter),
        "plain": run.placement is None,
        "precision": run.precision,
    }
    shim = ["-m", SHIM, json.dumps(given), *run.script.words]
    if run.placement is None:
        return [sys.executable, *shim]
    flags = [*run.placement.words, "--trial", "--stop-after", str(run.steps)]
    flags += ["--record-tensors", where]
    return [sys.executable, "-m", "shardwise", "run", *flags, *shim]


def _environment(run: Run) -> dict[str, str]:
    """Threads as many at every size, so that no sum is cut in another way for that alone."""
    threads = str(max(1, usable_cores() // run.most))
    return {"OMP_NUM_THREADS": threads, **os.environ, **run.environ}
