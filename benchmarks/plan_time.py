"""Predicts the step time of configurations on this machine, and measures it.

    python benchmarks/plan_time.py [--ranks 1,2] [--zero 0,2] [--rounds 3] [--json FILE] [--docs]

First `shardwise plan --calibrate` measures the machine: matrix products, memory, launches, links,
none of them of a model. Then each configuration of step_time.py is planned for `--on here`, and
trained. The measured over the predicted step of A on one rank is a factor, with which C and R are
also predicted ("scaled by A"): nothing of C and R is in either prediction. Of several rounds the
least median counts, because other processes only make steps longer. `--docs` puts the table into
docs/plan_accuracy.md.
"""

import argparse
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from rich.console import Console

import contenders
import figure
import machine
import plan_docs
import workloads
from crew import Crew
from figures import step_times
from rounds import WARM_UP
from shardwise.layout.placement import Placement
from shardwise.tools.plan.calibrate import calibrate
from shardwise.tools.plan.catalogue import read_catalogue
from shardwise.tools.plan.choice import Choice
from shardwise.tools.plan.clock import step_estimate
from shardwise.tools.plan.cluster import parse_cluster
from shardwise.tools.plan.observe import ObservedStep, Script, observe_sizes
from workloads import Setting

SCRIPT = Path(__file__).with_name("plan_step.py")
FIRST = "A"
"""The configuration that scales the others."""

TITLE = "Step time, measured here"
GOALS = {1: 0.05, 2: 0.10}
LIMIT = 300.0
"""Seconds for the start and for the steps of one run."""


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


def main(arguments: Sequence[str] | None = None) -> None:
    """Calibrate, predict, measure, print."""
    parser = figure.parser(__doc__)
    add = parser.add_argument
    add("--configs", type=figure.words, default=["A", "C", "R"])
    add("--ranks", type=figure.numbers, default=[1, 2])
    add("--zero", type=figure.numbers, default=[0, 2])
    add("--rounds", type=int, default=3)
    add("--steps", type=int, default=12)
    add("--hardware", type=Path, help="a calibration's file, in place of a new one")
    add("--docs", action="store_true", help="write docs/plan_accuracy.md")
    options = parser.parse_args(arguments)
    facts = figure.begin()
    with tempfile.TemporaryDirectory() as folder:
        hardware = options.hardware or calibrate(Console(stderr=True), Path(folder) / "here.toml")
        rows = list(_rows(options, hardware))
    lines = table(rows, facts)
    figure.show(*lines)
    figure.keep(options, facts, rows=[vars(row) for row in rows])
    if options.docs:
        plan_docs.put(TITLE, lines)


def _rows(options: argparse.Namespace, hardware: Path) -> Iterator[Row]:
    for name in (FIRST, *(each for each in options.configs if each != FIRST)):
        step = observe_sizes(Script((str(SCRIPT), name)))
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
    return step_estimate(step.at(share), choice, cluster).seconds


def measure(options: argparse.Namespace, name: str, ranks: int, level: int) -> float:
    """Return the median step of some, in seconds."""
    # The calibration has measured all cores together, so a step must use all of them.
    setting = Setting(threads=max(1, machine.cores() // ranks))
    workload = workloads.CONFIGURATIONS[name]
    with Crew(contenders.row(level), workload, ranks, LIMIT, setting) as crew:
        stint = crew.take(WARM_UP + options.steps)
    return median(step_times(stint.ends)[WARM_UP - 1 :]) / 1e3


def table(rows: Sequence[Row], facts: Mapping[str, str]) -> list[str]:
    """Return the table, and how many rows are within the goals."""
    first = next(row for row in rows if row.name == FIRST and row.ranks == 1)
    scale = first.measured / first.predicted
    cells = [
        [
            row.name,
            str(row.ranks),
            f"ZERO_{row.level}",
            f"{row.measured:.4f}",
            f"{row.predicted:.4f}",
            f"{row.error():+.1%}",
            f"{scale * row.predicted:.4f}",
            f"{row.error(scale):+.1%}",
        ]
        for row in rows
    ]
    held_out = [row for row in rows if row.name != FIRST]
    good = sum(abs(row.error(scale)) <= GOALS.get(row.ranks, 0.10) for row in held_out)
    head = ["ranks", "row", "measured, s", "predicted", "error", f"scaled by {FIRST}", "error"]
    return [
        f"`{facts['command']}`: {facts['machine']}, {facts['date']}.\n",
        f"Scaled by {FIRST} on one rank: {scale:.3f} times.\n",
        *figure.table(["configuration", *head], cells),
        f"\nGoal: 5 % at 1 rank, 10 % at 2; {good} of {len(held_out)} rows that nothing was scaled "
        "by are within it.",
    ]


if __name__ == "__main__":
    main()
