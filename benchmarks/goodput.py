"""The accuracy of `shardwise simulate`: a real training with kill -9 at exponential gaps.

    python benchmarks/goodput.py [--gaps 60,30,15] [--steps 400] [--ranks 2] [--json FILE] [--docs]
    python benchmarks/goodput.py --survive --ranks 3

Ranks of a small training are killed by a Poisson process of each mean gap, in seconds, and started
again by `--restarts`. The durations of a step, a save and a restart are measured before, in a
separate run with a few kills; nothing is fitted to the reported runs. Two figures are simulated:
for the same moments of the kills, and for any moments with that mean gap. `--docs` puts the table
into docs/simulate.md.

With `--survive`, the training runs with `--survive 1 --spares 1`. A killed rank is replaced by the
spare, and is started again as the next spare. In the simulation, each rank is a host.
"""

import argparse
import math
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import figure
import plan_docs
from shardwise.tools.simulate.failure_classes import FailureClass, Topology
from shardwise.tools.simulate.goodput import simulate
from shardwise.tools.simulate.run_model import RunModel
from shardwise.tools.simulate.trial import Trial

WORKER = Path(__file__).with_name("goodput_worker.py")
EVERY = 20
"""Steps between checkpoints."""

PAUSE = 0.1
"""Seconds that a step sleeps, so that its duration does not depend on other processes."""

CALIBRATED, RESTARTS = 5, 8.0
"""Kills of the run that measures the durations, and seconds between them besides its steps."""

LIMIT = 3600.0
"""Seconds that a training may take after its last kill."""

TRIALS = 200

TITLE = "Compared with real kills"
GOAL = 3.0
"""Points of goodput that the simulation may be off."""


@dataclass(frozen=True)
class Lengths:
    """Durations in seconds.

    `restart` is the time from a kill to the next step, without that step, also with `--survive`.
    With `--survive`, `admission` is the time for which the other ranks wait for a spare, and
    `start` the time from a kill until the lost rank waits as a spare.
    """

    step: float
    save: float
    restart: float
    admission: float = 0.0
    start: float = 0.0


@dataclass(frozen=True)
class Event:
    """A line of a rank (`what` with a number), or a kill."""

    second: float
    what: str
    number: int = 0


def ranks_of(launcher: int) -> list[int]:
    """Return the processes below `launcher` that are ranks."""
    found = []
    for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        try:
            if b"\0SHARDWISE_LAUNCH_RANK=" in Path(f"/proc/{child}/environ").read_bytes():
                found.append(int(child))
        except OSError:  # it has ended
            continue
    return found


class Training:
    """One training whose ranks are killed."""

    def __init__(self, options: argparse.Namespace, steps: int, folder: Path) -> None:
        self.events: list[Event] = []
        self._survives = options.survive
        self._words = [sys.executable, "-m", "shardwise", "run", "-n", str(options.ranks)]
        self._words += ["--survive", "1", "--spares", "1"] if options.survive else []
        self._words += ["--restarts", "1000", str(WORKER), str(folder), "--steps", str(steps)]
        self._words += ["--every", str(EVERY), "--pause", str(PAUSE)]
        self._words += ["--ranks", str(options.ranks)]
        self._start()

    def _start(self) -> None:
        self._process = subprocess.Popen(
            self._words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def run(self, gaps: Sequence[float], dice: random.Random) -> list[Event]:
        """Kill a rank after each of `gaps` until the training ends; return the events."""
        while not any(each.what == "start" for each in self.events):
            assert self._process.poll() is None, "the training did not start"
            time.sleep(0.01)
        until = self.events[0].second
        for gap in gaps:
            until += gap
            if self._is_done_before(until):
                return self.events
            self._kill(dice)
        raise AssertionError("there were fewer gaps than kills")

    def _is_done_before(self, second: float) -> bool:
        """Return whether the training has ended. If the launcher gave up, because three kills hit
        one step, the same command starts it again."""
        while (left := second - time.monotonic()) > 0:
            try:
                code = self._process.wait(left)
            except subprocess.TimeoutExpired:
                return False
            self._reader.join()
            if code == 0:
                return True
            self._start()
        return False

    def _kill(self, dice: random.Random) -> None:
        """Kill a rank, or the next one to start if none runs now.

        With `--survive`, kill a rank that trains, unless it is the last one.
        """
        while self._process.poll() is None:
            ranks = ranks_of(self._process.pid)
            if self._survives:
                training = {each.number for each in self.events if each.what == "trains"}
                ranks = [rank for rank in ranks if rank in training]
            if len(ranks) > self._survives:
                self.events.append(Event(time.monotonic(), "kill"))
                os.kill(dice.choice(ranks), signal.SIGKILL)
                return
            time.sleep(0.01)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if told := re.search(r"(start|step|ready|trains) (\d+)$", line.rstrip()):
                self.events.append(Event(time.monotonic(), told[1], int(told[2])))


def measured_lengths(options: argparse.Namespace) -> Lengths:
    """Measure the durations in a separate run that is killed a few times."""
    gap = 2 * EVERY * PAUSE + RESTARTS
    gaps = [gap] * CALIBRATED
    steps = 2 * EVERY * (CALIBRATED + 1)
    if options.survive:  # the others train while a lost rank is started again
        steps = math.ceil(gap / PAUSE) * (CALIBRATED + 1)
    with tempfile.TemporaryDirectory(prefix="goodput-") as folder:
        events = Training(options, steps, Path(folder)).run([*gaps, LIMIT], random.Random(0))
    made = [each for each in events if each.what == "step"]
    pairs = [(a, b) for a, b in pairwise(made) if b.number == a.number + 1]
    # Rank 0 prints a step before it saves: the save is in the time of the next step.
    even = [b.second - a.second for a, b in pairs if a.number % EVERY]
    with_save = [b.second - a.second for a, b in pairs if a.number % EVERY == 0]
    step = statistics.median(even)
    save = statistics.median(with_save) - step
    if options.survive:
        return _lengths_of_losses(options, events, step, save)
    # From the kill to the end of the first step after it, without that step.
    restarts = [
        next(each.second for each in made if _follows(each, events, kill)) - kill.second - step
        for kill in events
        if kill.what == "kill"
    ]
    return Lengths(step, save, statistics.median(restarts))


def _lengths_of_losses(
    options: argparse.Namespace, events: Sequence[Event], step: float, save: float
) -> Lengths:
    """Return the durations with `--survive`, from the lines after each kill."""
    reconnects, admissions, starts = [], [], []
    for kill in (each for each in events if each.what == "kill"):
        # The first step has a rank less. The spare joins before the second one.
        made = (each.second for each in events if each.what == "step" and each.second > kill.second)
        first, second = next(made, math.nan), next(made, math.nan)
        if math.isnan(second):  # the training ended
            continue
        ready = (e.second for e in events if e.what == "ready" and e.second > kill.second)
        starts.append(next(ready, kill.second) - kill.second)
        reconnects.append(first - kill.second - step * options.ranks / (options.ranks - 1))
        admissions.append(second - first - step)
    return Lengths(step, save, *map(statistics.median, (reconnects, admissions, starts)))


def _model(options: argparse.Namespace, gap: float, lengths: Lengths) -> RunModel:
    """Return the model of a training whose ranks are killed `gap` seconds apart in the mean."""
    steps = {
        "work": options.steps * lengths.step,
        "step": lengths.step,
        "interval": EVERY * lengths.step,
        "save": lengths.save,
    }
    if not options.survive:
        return RunModel(
            topology=Topology(1, options.ranks, 1, 1),
            failures=(FailureClass("kill", "kill -9", "job", 1 / gap, "job"),),
            restart=lengths.restart,
            **steps,
        )
    rate = 1 / gap / options.ranks
    return RunModel(
        topology=Topology(options.ranks, 1, options.ranks, 1),
        failures=(FailureClass("kill", "kill -9", "host", rate, "host", repair=lengths.start),),
        restart=lengths.start,
        reconnect=lengths.restart,
        # The simulation admits a host in the time of a save, of this, and of a reconnection.
        background=max(0.0, lengths.admission - lengths.save - lengths.restart),
        spares=1,
        **steps,
    )


def _follows(step: Event, events: Sequence[Event], kill: Event) -> bool:
    """Return whether the training has started again between `kill` and `step`."""
    return any(e.what == "start" and kill.second < e.second <= step.second for e in events)


def row(options: argparse.Namespace, gap: float, lengths: Lengths) -> dict[str, Any]:
    """Measure one training with kills `gap` seconds apart in the mean, and simulate it."""
    # Each gap has its own stream: its kills do not depend on which other gaps are measured.
    dice = random.Random(f"{options.seed} {gap}")
    gaps = [dice.expovariate(1 / gap) for _ in range(10_000)]
    with tempfile.TemporaryDirectory(prefix="goodput-") as folder:
        events = Training(options, options.steps, Path(folder)).run(gaps, dice)
    began = next(each.second for each in events if each.what == "start")
    wall = max(each.second for each in events if each.what == "step") - began
    kills = [each.second - began for each in events if each.what == "kill"]
    model = _model(options, gap, lengths)
    same = Trial(model, 0, moments=kills).run()
    found = simulate(model, TRIALS, options.seed)
    measured = options.steps * lengths.step / wall
    return {
        "gap": gap,
        "kills": len(kills),
        "measured": measured,
        "same_moments": same.goodput,
        "points": 100 * (same.goodput - measured),
        "any_moments": vars(found.goodput),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print the table."""
    parser = figure.parser(__doc__)
    parser.add_argument("--gaps", type=figure.floats, default=[60.0, 30.0, 15.0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--survive", action="store_true", help="train with --survive and a spare")
    parser.add_argument("--docs", action="store_true", help="write docs/simulate.md")
    options = parser.parse_args(arguments)
    facts, lengths = figure.begin(), measured_lengths(options)
    gaps = ",".join(f"{gap:g}" for gap in options.gaps)
    survive = " --survive" if options.survive else ""
    what, how = "a restart", "`--restarts` starts them again"
    if options.survive:
        what, how = "continuing after a loss", "`--survive 1 --spares 1` replaces them"
    more = ""
    if options.survive:
        more = f", admitting a spare {lengths.admission:.2f} s, starting it {lengths.start:.2f} s"
    head = (
        f"`python benchmarks/goodput.py{survive} --gaps {gaps} --steps {options.steps} --ranks "
        f"{options.ranks}`: {facts['machine']}, {facts['date']}. A Poisson process kills ranks "
        f"(`kill -9`), and {how}. The durations are from a separate run: a step takes "
        f"{lengths.step:.4f} s, a save {lengths.save:.4f} s, {what} {lengths.restart:.2f} s{more}. "
        f"A run has {options.steps} steps, and saves a checkpoint every {EVERY} steps.\n"
    )
    rows = []
    for gap in options.gaps:
        rows.append(row(options, gap, lengths))
        figure.show(" ".join(_cells(rows[-1])))
    good = sum(abs(each["points"]) <= GOAL for each in rows)
    names = ["kills", "goodput measured", "simulated, same kills", "points off"]
    names.append("simulated, any kills (5 to 95 %)")
    table = figure.table(["mean gap, s", *names], [_cells(each) for each in rows])
    summary = f"\n{good} of {len(rows)} are within {GOAL} points of the measured goodput."
    lines = [head, *table, summary]
    figure.show(*lines)
    figure.keep(options, facts, lengths=vars(lengths), rows=rows)
    if options.docs:
        title = f"{TITLE} under --survive" if options.survive else TITLE
        plan_docs.put(title, lines, plan_docs.PAGE.with_name("simulate.md"))
    return 0


def _cells(found: Mapping[str, Any]) -> list[str]:
    band = found["any_moments"]
    return [
        f"{found['gap']:g}",
        str(found["kills"]),
        f"{found['measured']:.1%}",
        f"{found['same_moments']:.1%}",
        f"{found['points']:+.1f}",
        f"{band['mean']:.1%} ({band['low']:.1%} to {band['high']:.1%})",
    ]


if __name__ == "__main__":
    sys.exit(main())
