"""Runs a script at one size after the other, each run with a record and a log of its own."""

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
    """The runs to make: `words` are the script and its arguments, `flags` those of `shardwise run`.

    At each size in `sizes`, and of each kind: "strong" with the same total batch, "weak" with the
    same batch per worker. The first `warmup` steps of a run are dropped, and it ends after `steps`
    more, or when the script does.
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
        """Threads of a rank where the user does not say: equal at every size, so that workers
        compare."""
        return max(1, usable_cores() // max(self.sizes))

    @property
    def limit(self) -> int | None:
        """The number of steps after which a run ends."""
        return None if self.steps is None else self.steps + self.warmup


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """A run that has ended, with its result `measured`, or the `error` that ended it."""

    kind: str
    workers: int
    log: Path
    wall: float
    measured: Measured | None = None
    error: str | None = None


OnStep = Callable[[int], None]
"""Called now and then with the number of steps that the run has made."""


def run(plan: ScalingPlan, kind: str, workers: int, on_step: OnStep) -> MeasuredRun:
    """Run the script once. Raises KeyboardInterrupt after ending the run, if that is pressed."""
    folder = _folder(plan.out / "runs" / f"{kind}-{workers}")
    log = folder / LOG
    start = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            _command(plan, kind, workers, folder),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={"OMP_NUM_THREADS": str(plan.threads), **os.environ},
        )
        code = program.wait_for(process, lambda: on_step(records.steps_made(folder)))
    ended = MeasuredRun(kind=kind, workers=workers, log=log, wall=time.monotonic() - start)
    if code:
        return replace(
            ended, error=f"exit code {code}: {last_words(log.read_text(errors='replace'))}"
        )
    try:
        return replace(ended, measured=records.read(folder, workers, plan.warmup))
    except TooFew as error:
        return replace(ended, error=str(error))


def _folder(folder: Path) -> Path:
    """The folder of a run, without the log and the records of an earlier one: nothing else that
    lies there is touched."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        if path.name == LOG or re.fullmatch(r"rank-\d+\.jsonl", path.name):
            path.unlink()
    return folder


def _command(plan: ScalingPlan, kind: str, workers: int, folder: Path) -> list[str]:
    flags = ["-n", str(workers), *plan.flags, "--record", str(folder.resolve())]
    flags += ["--batch", "worker" if kind == WEAK else "total"]  # whatever else is set
    flags += ["--trial"]  # else a size would begin where the one before it has saved
    if plan.limit is not None:
        flags += ["--stop-after", str(plan.limit)]
    return [*python_words("shardwise"), "run", *flags, *plan.words]
