"""Runs a script at one size after the other. Each run has its own record and log."""

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
    """The runs to make: `words` are the script and its arguments, `flags` are for `shardwise run`.

    There is a run for each size in `sizes` and each kind: "strong" keeps the total batch, "weak"
    the batch per worker. The first `warmup` steps of a run are dropped. It ends after `steps` more,
    or when the script does.
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
        """Threads per rank unless the user sets them: equal at every size, to compare workers."""
        return max(1, usable_cores() // max(self.sizes))

    @property
    def limit(self) -> int | None:
        """The number of steps after which a run is stopped."""
        return None if self.steps is None else self.steps + self.warmup


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """A finished run with its result `measured`, or the `error` that ended it."""

    kind: str
    workers: int
    log: Path
    wall: float
    measured: Measured | None = None
    error: str | None = None


OnStep = Callable[[int], None]
"""Called during the run with the number of steps so far."""


def run(plan: ScalingPlan, kind: str, workers: int, on_step: OnStep) -> MeasuredRun:
    """Run the script once. On Ctrl-C, end the run and raise KeyboardInterrupt."""
    folder = _folder(plan.out / "runs" / f"{kind}-{workers}")
    log = folder / LOG
    start = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            _command(plan, kind, workers, folder),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            # In this order the user's own OMP_NUM_THREADS wins.
            env={"OMP_NUM_THREADS": str(plan.threads), **os.environ},
        )
        code = program.wait_for(process, lambda: on_step(records.steps_made(folder)))
    ended = MeasuredRun(kind=kind, workers=workers, log=log, wall=time.monotonic() - start)
    # A failed size is reported, and the others still run: the largest may just not fit into memory.
    if code:
        return replace(
            ended, error=f"exit code {code}: {last_words(log.read_text(errors='replace'))}"
        )
    try:
        return replace(ended, measured=records.read(folder, workers, plan.warmup))
    except TooFew as error:
        return replace(ended, error=str(error))


def _folder(folder: Path) -> Path:
    """Create the folder of a run, and remove log and records of an earlier run from it."""
    # By name: --out may be a folder with files of the user.
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        if path.name == LOG or re.fullmatch(r"rank-\d+\.jsonl", path.name):
            path.unlink()
    return folder


def _command(plan: ScalingPlan, kind: str, workers: int, folder: Path) -> list[str]:
    flags = ["-n", str(workers), *plan.flags, "--record", str(folder.resolve())]
    # Last, so that they win over the user's flags.
    flags += ["--batch", "worker" if kind == WEAK else "total"]
    flags += ["--trial"]  # otherwise a size would resume from the checkpoint of the one before
    if plan.limit is not None:
        flags += ["--stop-after", str(plan.limit)]
    return [*python_words("shardwise"), "run", *flags, *plan.words]
