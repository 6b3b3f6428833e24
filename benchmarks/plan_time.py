"""Predicts the step time of configurations on this machine, and measures them beside that.

    python benchmarks/plan_time.py [--ranks 1,2] [--zero 0,2] [--rounds 3] [--json FILE] [--docs]

First `shardwise plan --calibrate` measures the machine: matrix products, memory, launches, links,
none of them of a model. Then each configuration of step_time.py is planned for `--on here`, and
trained. What the planner says of A on one rank is compared with what A takes there, and C and R are
also predicted with that one factor ("scaled by A"): nothing of C and R is in either prediction. Of
several rounds the least median counts, since what else the machine does only makes steps longer;
`--docs` puts the table into docs/plan_accuracy.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

import machine
import plan_docs
from shardwise.layout.placement import Placement
from shardwise.tools.plan.calibrate import calibrate
from shardwise.tools.plan.catalogue import read_catalogue
from shardwise.tools.plan.choice import Choice
from shardwise.tools.plan.clock import ScriptClock
from shardwise.tools.plan.cluster import parse_cluster
from shardwise.tools.plan.observe import ObservedStep, Script, observe_sizes

SCRIPT = Path(__file__).with_name("plan_step.py")
FIRST = "A"
"""The configuration that scales the others."""

TITLE = "Step time, measured here"
GOALS = {1: 0.05, 2: 0.10}


@dataclass(frozen=True)
class Row:
    """A configuration on some ranks: seconds of a step."""

    name: str
    ranks: int
    level: int
    measured: float
    predicted: float

    def error(self, scale: float = 1.0) -> float:
        """How far off the prediction is, `scale` times as long."""
        return scale * self.predicted / self.measured - 1


def main() -> None:
    """Calibrate, predict, measure, print."""
    options = _options()
    with tempfile.TemporaryDirectory() as folder:
        hardware = options.hardware or calibrate(Console(stderr=True), Path(folder) / "here.toml")
        rows = list(_rows(options, hardware))
    lines = list(table(rows))
    print("\n".join(lines))
    if options.json:
        told = {"machine": machine.describe(), "rows": [vars(row) for row in rows]}
        options.json.write_text(json.dumps(told, indent=1) + "\n")
    if options.docs:
        plan_docs.put(TITLE, lines)


def _rows(options: argparse.Namespace, hardware: Path) -> Iterator[Row]:
    for name in (FIRST, *(each for each in options.configs if each != FIRST)):
        step = observe_sizes(Script((str(SCRIPT), name)), activations="kept")
        for ranks in options.ranks:
            for level in options.zero if ranks > 1 else (0,):
                predicted = predict(step, ranks, level, hardware)
                measured = min(measure(options, name, ranks, level) for _ in range(options.rounds))
                yield Row(name, ranks, level, measured, predicted)


def predict(step: ObservedStep, ranks: int, level: int, hardware: Path) -> float:
    """Seconds of a step on this machine, as `hardware` has it."""
    share = step.large.total_batch // ranks
    choice = Choice(row=Placement.zero(level), data=ranks, micro_batch=share)
    catalogue = read_catalogue([hardware], user=False)
    cluster = parse_cluster(f"{ranks}xhere", catalogue)
    return ScriptClock().seconds(step.at(share), choice, cluster).seconds


def measure(options: argparse.Namespace, name: str, ranks: int, level: int) -> float:
    """The median of a training's steps, in seconds; each rank has its share of the cores."""
    threads = max(1, (os.cpu_count() or 1) // ranks)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "seconds.json"
        words = [sys.executable, "-m", "shardwise", "run", "-n", str(ranks), "--quiet"]
        words += ["--zero", str(level), str(SCRIPT), name, "--steps", str(options.steps)]
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        subprocess.run([*words, "--out", str(out)], env=environment, check=True)
        return float(json.loads(out.read_text()))


def table(rows: Sequence[Row]) -> Iterator[str]:
    """The table, and how many rows are within the goals."""
    first = next(row for row in rows if row.name == FIRST and row.ranks == 1)
    scale = first.measured / first.predicted
    facts = machine.describe()
    yield f"`{facts['command']}`: {facts['machine']}, {facts['date']}.\n"
    yield f"Scaled by {FIRST} on one rank: {scale:.3f} times.\n"
    yield "| configuration | ranks | row | measured, s | predicted | error | scaled by A | error |"
    yield "|---|--:|--:|--:|--:|--:|--:|--:|"
    for row in rows:
        yield (
            f"| {row.name} | {row.ranks} | ZERO_{row.level} | {row.measured:.4f} "
            f"| {row.predicted:.4f} | {row.error():+.1%} | {scale * row.predicted:.4f} "
            f"| {row.error(scale):+.1%} |"
        )
    held_out = [row for row in rows if row.name != FIRST]
    good = sum(abs(row.error(scale)) <= GOALS.get(row.ranks, 0.10) for row in held_out)
    yield (
        f"\nGoal: 5 % at 1 rank, 10 % at 2; {good} of {len(held_out)} rows that nothing was scaled "
        "by are within it."
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    numbers = lambda text: [int(each) for each in text.split(",")]  # noqa: E731
    parser.add_argument("--configs", type=lambda text: text.split(","), default=["A", "C", "R"])
    parser.add_argument("--ranks", type=numbers, default=[1, 2])
    parser.add_argument("--zero", type=numbers, default=[0, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--hardware", type=Path, help="a calibration's file, in place of a new one")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--docs", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
