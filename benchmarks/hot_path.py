"""What the engine adds to a step so small that little else is left.

    python benchmarks/hot_path.py [--ranks 1,2] [--rows 0,1,2,3] [--rounds 20] [--steps 20]
        [--transport auto,gloo] [--json FILE]

A GPT of width 64 with 16 blocks, so 17 units, is trained by the plain loop and by each row, with
one thread per rank. With several ranks the plain loop runs on each of them and tells the others
nothing: what is added is then the collectives too. All are alive from the start and asleep but for
their turns; in each round everyone takes some steps. Figures are medians over the rounds of the
median step; what is added is taken within a round. `CPU` is what a rank's threads used per step,
waits left out, which neighbours disturb less. A page fault per step is memory that was given back
and is asked for again.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

import contenders
import machine
from contenders import PLAIN, Contender
from crew import Crew
from figures import step_times
from neighbours import Neighbours, remark
from workloads import Gpt

SMALL = Gpt(name="small", width=64, layers=16, vocabulary=256, sequence=32, batch=4)
UNITS = SMALL.layers + 1
WARM_UP = 30
Told = Sequence[Mapping[str, Any]]
TARGET = 1.0 + 0.1 * UNITS
"""ms per step that the engine may add in one process."""


@dataclass
class Line:
    """One contender: by round, the median ms of a step; per rank and step of each round, what it
    used."""

    label: str
    rounds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    faults: list[float] = field(default_factory=list)

    def added(self, plain: "Line") -> float:
        """ms per step beyond those of the plain loop in the same round."""
        return median(a - b for a, b in zip(self.rounds, plain.rounds, strict=True))

    def as_json(self, plain: "Line") -> dict[str, Any]:
        """What the table shows, and the rounds."""
        return {
            "label": self.label,
            "ms": median(self.rounds),
            "added_ms": self.added(plain),
            "cpu_ms": median(self.cpu),
            "faults": median(self.faults),
            "rounds_ms": self.rounds,
        }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print one table for each number of ranks."""
    options = _parser().parse_args(arguments)
    about = machine.describe()
    console = Console() if sys.stdout.isatty() else Console(width=100)
    for name, value in about.items():
        console.print(f"{name:>9}  {value}", highlight=False, soft_wrap=True)
    results = []
    for ranks in options.ranks:
        neighbours = Neighbours()
        lines = _measure(_takers(options), ranks, options)
        console.print(_table(lines, ranks))
        console.print(remark(neighbours.share()), highlight=False)
        results.append({"ranks": ranks, "lines": [line.as_json(lines[0]) for line in lines]})
        if options.json:
            whole = {"machine": about, "target_ms": TARGET, "results": results}
            machine.write_json(options.json, whole)
    return 0


def _takers(options: argparse.Namespace) -> list[Contender]:
    rows = [contenders.row(zero, how) for how in options.transport for zero in options.rows]
    return [replace(PLAIN, label="plain PyTorch", alone=False), *rows]


def _measure(takers: Sequence[Contender], ranks: int, options: argparse.Namespace) -> list[Line]:
    """Start all, warm them up, and give each its turn in every round."""
    lines = [Line(taker.label) for taker in takers]
    with ExitStack() as alive:
        crews = [alive.enter_context(Crew(t, SMALL, ranks, options.limit)) for t in takers]
        before = [crew.take(WARM_UP).told for crew in crews]
        for _ in range(options.rounds):
            for index, (line, crew) in enumerate(zip(lines, crews, strict=True)):
                stint = crew.take(options.steps + 1)
                line.rounds.append(median(step_times(stint.ends)))
                each = (options.steps + 1) * ranks
                line.cpu.append(_used("cpu", before[index], stint.told) / each)
                line.faults.append(_used("faults", before[index], stint.told) / each)
                before[index] = stint.told
    return lines


def _used(what: str, before: Told, after: Told) -> float:
    """By all ranks in between."""
    pairs = zip(before, after, strict=True)
    return sum(now["used"][what] - then["used"][what] for then, now in pairs)


def _table(lines: Sequence[Line], ranks: int) -> Table:
    of = "one process" if ranks == 1 else f"{ranks} ranks"
    table = Table(title=f"{of}, {UNITS} units", box=SIMPLE, title_justify="left")
    table.add_column("")
    for name in ("ms/step", "added", "added per unit", "CPU ms", "page faults"):
        table.add_column(name, justify="right")
    for line in lines:
        added = line.added(lines[0])
        shown = ["", ""] if line is lines[0] else [f"{added:.2f}", f"{added / UNITS:.3f}"]
        used = f"{median(line.cpu):.2f}", f"{median(line.faults):.1f}"
        table.add_row(line.label, f"{median(line.rounds):.2f}", *shown, *used)
    if ranks == 1:
        table.caption = f"The engine may add {TARGET:.1f} ms."
    return table


def _parser() -> argparse.ArgumentParser:
    summary, _, method = __doc__.partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=method, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=_numbers, default=[1, 2], metavar="1,2")
    parser.add_argument("--rows", type=_numbers, default=[0, 1, 2, 3], metavar="0,1,2,3")
    parser.add_argument("--transport", type=_words, default=["auto"], metavar="auto,gloo")
    parser.add_argument("--rounds", type=int, default=20, metavar="N")
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="timed, per round")
    parser.add_argument("--limit", type=float, default=120.0, metavar="S", help="per turn")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    return parser


def _words(text: str) -> list[str]:
    return text.split(",")


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
