"""Runs a script once, with or without `shardwise run`, and reads the record of its ranks."""

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

from shardwise.launch import allocations, program
from shardwise.launch.resources import usable_cores
from shardwise.net.python_command import python_words
from shardwise.tools.report.output import last_words
from shardwise.tools.verify import records
from shardwise.tools.verify.placements import RunPlacement
from shardwise.tools.verify.records import RecordedTraining
from shardwise.tools.warm.warm_ranks import WarmRanks
from shardwise.world.tensor_log import WANTED

RANK_SCRIPT = "shardwise.tools.verify.script"
RECORDS = "record-"
"""Prefix of the folders for the records of runs."""

OnStep = Callable[[int], None]


@dataclass(frozen=True, kw_only=True)
class ScriptCommand:
    """The program to run.

    `words` are the script and its arguments. If `module` is true, the first word is a module name.
    `adopting` is the command line of the module that runs the program with --adopt.
    """

    words: tuple[str, ...]
    module: bool = False
    adopting: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of a script.

    Attributes:
        script: The script to run.
        placement: The placement, or None to run without a launcher.
        steps: Number of steps after which to stop.
        alter: Values of alterations by name (see alterations.py).
        values: Names of the tensors whose values to record, or None for all small tensors.
        environ: Additional environment variables.
    """

    script: ScriptCommand
    placement: RunPlacement | None
    steps: int
    alter: Mapping[str, Any] = field(default_factory=dict)
    values: Sequence[str] | None = None
    environ: Mapping[str, str] = field(default_factory=dict)
    precision: str = "fp32"
    """Precision of a script that trains without an engine."""
    max_size: int = 1
    """Largest number of ranks of any run. It determines the number of threads per rank."""
    server: int = 0
    """Number of the fork server for rank 0. Each server has a different hash seed."""


class RunFailed(Exception):
    """Raised if a run exits with a nonzero exit code. `output` is the run's full output."""

    def __init__(self, name: str, code: int, output: str) -> None:
        super().__init__(f"{name} ended with exit code {code}: {last_words(output)}")
        self.code = code
        self.output = output


def make(
    run: Run, name: str, log: Path, on_step: OnStep, warm: WarmRanks | None = None
) -> RecordedTraining:
    """Execute a run, write its output to `log`, and return its record.

    Ranks are forked from `warm` processes if possible. On Ctrl-C, the ranks are stopped first. The
    files of the record are always removed. Raises RunFailed, with `name` in the message, if the run
    exits with an error.
    """
    folder = Path(tempfile.mkdtemp(prefix=RECORDS, dir=log.parent))
    try:
        if run.values is not None:
            (folder / WANTED).write_text(json.dumps({"names": list(run.values)}))
        with log.open("wb") as output:
            process = subprocess.Popen(
                command(run, folder, warm),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**environment(run.max_size), **run.environ},
            )
            code = program.wait_for(process, lambda: on_step(records.count_steps(folder)))
        if code:
            raise RunFailed(name, code, log.read_text(errors="replace"))
        return records.read(folder)
    finally:
        # Remove the record even after an error, because records of large models fill a disk
        # quickly.
        shutil.rmtree(folder, ignore_errors=True)


def command(run: Run, folder: Path, warm: WarmRanks | None = None) -> list[str]:
    """Return the command line of a run that writes its record to `folder`."""
    where = str(folder.resolve())
    options = {
        "record": where,
        "steps": run.steps,
        "module": run.script.module or bool(run.script.adopting),
        "alter": dict(run.alter),
        "plain": run.placement is None,
        "precision": run.precision,
    }
    arguments = [json.dumps(options), *(run.script.adopting or run.script.words)]
    shim = ["-m", RANK_SCRIPT, *arguments]
    # Fork from a warm process, unless the run sets variables that the interpreter reads at startup
    # (PYTHONHASHSEED), or may have ranks on other hosts, which have no warm process.
    if (
        warm is not None
        and warm.are_running
        and not run.environ
        and not (run.placement and run.placement.launcher)
    ):
        shim = warm.words(run.server, arguments)
    if run.placement is None:
        # -P prevents modules in the current folder from shadowing Shardwise's. rank_client.py does
        # not need it, because it imports none of them.
        return [sys.executable, *(["-P"] if shim[0] == "-m" else []), *shim]
    # With --trial, the run does not resume, save or export anything.
    flags = [*run.placement.words, "--trial", "--stop-after", str(run.steps)]
    flags += ["--record-tensors", where]
    return [*python_words("shardwise"), "run", *flags, *shim]


def environment(max_size: int) -> dict[str, str]:
    """Return the environment variables of a run.

    The number of threads per rank depends only on `max_size`, so that it is the same in all runs.
    The variables of a batch job are removed, so that the run stays on this host: other hosts might
    not be able to access the folder of the records.
    """
    # Use the number of threads of the largest run. Kernels split sums among threads, so a smaller
    # run with more threads per rank would differ by rounding for that reason alone.
    threads = str(max(1, usable_cores() // max_size))
    kept = {n: value for n, value in os.environ.items() if n not in allocations.VARIABLES}
    return {"OMP_NUM_THREADS": threads, **kept}


def warm_ranks(script: ScriptCommand, max_size: int) -> WarmRanks:
    """Return warm processes for the runs of `script` on up to `max_size` ranks."""
    return WarmRanks(script.words, RANK_SCRIPT, environment(max_size))
