"""Runs a script once with a certain number of workers, and reads the run's record."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from shardwise.launch import program
from shardwise.launch.resources import usable_cores
from shardwise.net.python_command import python_words
from shardwise.tools.report.output import last_words
from shardwise.tools.scale import records
from shardwise.tools.scale.records import Measured, TooFew

STRONG, WEAK = "strong", "weak"
LOG = "output.txt"


@dataclass(frozen=True, kw_only=True)
class ScalingPlan:
    """The runs of a measurement: one for each number of workers and each kind of scaling.

    Attributes:
        words: The script and its arguments.
        flags: Flags of `shardwise run`.
        sizes: The numbers of workers.
        kinds: "strong" (constant total batch), "weak" (constant batch per worker), or both.
        warmup: Number of steps to drop at the start of each run.
        steps: Number of steps after the warm-up, or None to run until the script ends.
        out: Folder for the results.
    """

    words: tuple[str, ...]
    flags: tuple[str, ...]
    sizes: tuple[int, ...]
    kinds: tuple[str, ...]
    warmup: int
    steps: int | None
    out: Path

    @property
    def threads(self) -> int:
        """The default number of threads per rank, the same in all runs for a fair comparison."""
        return max(1, usable_cores() // max(self.sizes))

    @property
    def limit(self) -> int | None:
        """The total number of steps after which to stop a run, or None for no limit."""
        return None if self.steps is None else self.steps + self.warmup


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """A finished run, with its result `measured` or with the `error` that made it fail.

    `wall` is its duration in seconds, and `log` is the file with its output.
    """

    kind: str
    workers: int
    log: Path
    wall: float
    measured: Measured | None = None
    error: str | None = None


OnStep = Callable[[int], None]
"""Called during a run with the number of completed steps."""


def run(plan: ScalingPlan, kind: str, workers: int, on_step: OnStep) -> MeasuredRun:
    """Run the script once. On Ctrl-C, stop the run and raise KeyboardInterrupt."""
    folder = _folder(plan.out / "runs" / f"{kind}-{workers}")
    log = folder / LOG
    start = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            _command(plan, kind, workers, folder),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            # The user's own OMP_NUM_THREADS overrides the default.
            env={"OMP_NUM_THREADS": str(plan.threads), **os.environ},
        )
        code = program.wait_for(process, lambda: on_step(records.steps_made(folder)))
    ended = MeasuredRun(kind=kind, workers=workers, log=log, wall=time.monotonic() - start)
    # Report a failed run without stopping the measurement, because other sizes may still succeed
    # (one worker may not have enough memory, for example).
    if code:
        return replace(
            ended, error=f"exit code {code}: {last_words(log.read_text(errors='replace'))}"
        )
    try:
        return replace(ended, measured=records.read(folder, workers, plan.warmup))
    except TooFew as error:
        return replace(ended, error=str(error))


def _folder(folder: Path) -> Path:
    """Create a run's folder, and delete any log and records of an earlier run from it."""
    # Remove only files with known names, because --out may contain the user's own files.
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        if path.name == LOG or re.fullmatch(r"rank-\d+\.jsonl", path.name):
            path.unlink()
    return folder


def _command(plan: ScalingPlan, kind: str, workers: int, folder: Path) -> list[str]:
    flags = ["-n", str(workers), *plan.flags, "--record", str(folder.resolve())]
    # Added last, so that they override the user's flags.
    flags += ["--batch", "worker" if kind == WEAK else "total"]
    flags += ["--trial"]  # otherwise a run would resume from the previous run's checkpoint
    if plan.limit is not None:
        flags += ["--stop-after", str(plan.limit)]
    return [*python_words("shardwise"), "run", *flags, *plan.words]
