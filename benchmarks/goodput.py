"""Whether `shardwise simulate` is right: a real training with kill -9 at exponential gaps.

    python benchmarks/goodput.py [--gaps 60,30,15] [--steps 400] [--ranks 2] [--json FILE] [--docs]

Ranks of a small training are killed as a Poisson process of each mean gap says, in seconds, and
started again by `--restarts`. The length of a step, of a save and of a restart are measured before,
in a run of its own with a few kills; nothing is fitted to what is reported. The simulation is asked
twice: for the very moments of the kills, and for any moments with that mean gap. `--docs` puts the
table into docs/simulate.md.
"""

from __future__ import annotations

import argparse
import json
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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import machine
import plan_docs
from faults import ranks_of
from shardwise.tools.simulate.failure_classes import FailureClass, Topology
from shardwise.tools.simulate.goodput import simulate
from shardwise.tools.simulate.run_model import RunModel
from shardwise.tools.simulate.trial import Trial

WORKER = Path(__file__).with_name("goodput_worker.py")
EVERY = 20
"""Steps between checkpoints."""

PAUSE = 0.1
"""Seconds that a step sleeps, so that its length does not depend on what else runs."""

CALIBRATED, RESTARTS = 5, 8.0
"""Kills of the run that measures the lengths, and seconds between them beside its steps."""

LIMIT = 3600.0
"""Seconds that a training may take after its last kill."""

TRIALS = 200

TITLE = "Beside real kills"
GOAL = 3.0
"""Points of goodput that the simulation may be off."""


@dataclass(frozen=True)
class Lengths:
    """What one step, one save and one restart take, in seconds."""

    step: float
    save: float
    restart: float


@dataclass(frozen=True)
class Event:
    """A line of rank 0, `what` with a number of steps; or a kill."""

    second: float
    what: str
    steps: int = 0


class Training:
    """One training, whose ranks are killed `kills` seconds after its first step."""

    def __init__(self, options: argparse.Namespace, steps: int, folder: Path) -> None:
        self.events: list[Event] = []
        self._words = [sys.executable, "-m", "shardwise", "run", "-n", str(options.ranks)]
        self._words += ["--restarts", "1000", str(WORKER), str(folder), "--steps", str(steps)]
        self._words += ["--every", str(EVERY), "--pause", str(PAUSE)]
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
        """Kill a rank after each of `gaps` until the training ends; returns what happened."""
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
        """Whether the training has come to its end; one whose launcher gave up, since three kills
        had hit one step, is started again by the same command."""
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
        """Kill a rank, or the first that comes where none runs now."""
        while self._process.poll() is None:
            if ranks := ranks_of(self._process.pid):
                self.events.append(Event(time.monotonic(), "kill"))
                os.kill(dice.choice(ranks), signal.SIGKILL)
                return
            time.sleep(0.01)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if told := re.search(r"(start|step) (\d+)$", line.rstrip()):
                self.events.append(Event(time.monotonic(), told[1], int(told[2])))


def measured_lengths(options: argparse.Namespace) -> Lengths:
    """The lengths, from a run of its own that is killed a few times."""
    steps = 2 * EVERY * (CALIBRATED + 1)
    gaps = [2 * EVERY * PAUSE + RESTARTS] * CALIBRATED
    with tempfile.TemporaryDirectory(prefix="goodput-") as folder:
        events = Training(options, steps, Path(folder)).run([*gaps, LIMIT], random.Random(0))
    made = [each for each in events if each.what == "step"]
    pairs = [(a, b) for a, b in pairwise(made) if b.steps == a.steps + 1]
    even = [b.second - a.second for a, b in pairs if a.steps % EVERY]
    with_save = [b.second - a.second for a, b in pairs if a.steps % EVERY == 0]
    step = statistics.median(even)
    restarts = [
        next(each.second for each in made if _follows(each, events, kill)) - kill.second - step
        for kill in events
        if kill.what == "kill"
    ]
    return Lengths(step, statistics.median(with_save) - step, statistics.median(restarts))


def _follows(step: Event, events: Sequence[Event], kill: Event) -> bool:
    """Whether the training has started again between `kill` and `step`."""
    return any(e.what == "start" and kill.second < e.second <= step.second for e in events)


def row(options: argparse.Namespace, gap: float, lengths: Lengths) -> dict[str, Any]:
    """One training with kills `gap` seconds apart in the mean, and what is simulated of it."""
    dice = random.Random(f"{options.seed} {gap}")
    gaps = [dice.expovariate(1 / gap) for _ in range(10_000)]
    with tempfile.TemporaryDirectory(prefix="goodput-") as folder:
        events = Training(options, options.steps, Path(folder)).run(gaps, dice)
    began = next(each.second for each in events if each.what == "start")
    wall = max(each.second for each in events if each.what == "step") - began
    kills = [each.second - began for each in events if each.what == "kill"]
    model = RunModel(
        topology=Topology(1, options.ranks, 1, 1),
        failures=(FailureClass("kill", "kill -9", "job", 1 / gap, "job"),),
        work=options.steps * lengths.step,
        step=lengths.step,
        interval=EVERY * lengths.step,
        save=lengths.save,
        restart=lengths.restart,
    )
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
    options = _parser().parse_args(arguments)
    facts, lengths = machine.describe(), measured_lengths(options)
    lines, rows = [*_head(options, facts, lengths)], []
    print("\n".join(lines), flush=True)
    for gap in options.gaps:
        rows.append(row(options, gap, lengths))
        lines.append(_cells(rows[-1]))
        print(lines[-1], flush=True)
    good = sum(abs(made["points"]) <= GOAL for made in rows)
    lines.append(f"\n{good} of {len(rows)} are within {GOAL} points of what was measured.")
    print(lines[-1])
    if options.json:
        told = {"machine": facts, "lengths": vars(lengths), "rows": rows}
        options.json.write_text(json.dumps(told, indent=1) + "\n")
    if options.docs:
        plan_docs.put(TITLE, lines, plan_docs.PAGE.with_name("simulate.md"))
    return 0


def _head(options: argparse.Namespace, facts: Mapping[str, str], lengths: Lengths) -> Iterator[str]:
    """What was run where, and the head of the table."""
    gaps = ",".join(f"{gap:g}" for gap in options.gaps)
    yield (
        f"`python benchmarks/goodput.py --gaps {gaps} --steps {options.steps} --ranks "
        f"{options.ranks}`: {facts['machine']}, {facts['date']}. Ranks are killed (`kill -9`) as a "
        "Poisson process says, and `--restarts` starts them again. The lengths are from a run of "
        f"its own: a step takes {lengths.step:.4f} s, a save {lengths.save:.4f} s, a restart "
        f"{lengths.restart:.2f} s; {EVERY} steps between checkpoints, {options.steps} in all.\n"
    )
    yield (
        "| mean gap, s | kills | goodput measured | simulated, same kills | points off "
        "| simulated, any kills (5 to 95 %) |"
    )
    yield "|--:|--:|--:|--:|--:|--:|"


def _cells(made: Mapping[str, Any]) -> str:
    """A row of the table."""
    band = made["any_moments"]
    return (
        f"| {made['gap']:g} | {made['kills']} | {made['measured']:.1%} "
        f"| {made['same_moments']:.1%} | {made['points']:+.1f} "
        f"| {band['mean']:.1%} ({band['low']:.1%} to {band['high']:.1%}) |"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    numbers = lambda text: [float(each) for each in text.split(",")]  # noqa: E731
    parser.add_argument("--gaps", type=numbers, default=[60.0, 30.0, 15.0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--docs", action="store_true", help="write docs/simulate.md")
    return parser


if __name__ == "__main__":
    sys.exit(main())
