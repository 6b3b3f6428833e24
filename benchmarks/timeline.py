"""What a timeline costs while it is recorded: steps with it beside steps without.

    python benchmarks/timeline.py [--config A,small] [--ranks 2] [--rows 0,3] [--transport auto]
        [--rounds 20] [--steps 20] [--json FILE]

Each line trains twice, with and without a timeline; both are alive from the start and take turns,
one thread per rank. `ratio` is the median over the rounds of a step with it over one without it in
the same round, `CPU` the same of what a rank's threads used, which neighbours disturb less and
which has the thread that writes. `small` is the model of hot_path.py, whose steps are nearly
nothing but events. The target is 1.02, for configurations that do some work.
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
from crew import Crew
from figures import step_times
from hot_path import SMALL
from neighbours import Neighbours, remark
from workloads import CONFIGURATIONS, Workload

WARM_UP = 10
TARGET = 1.02
FILE = "timeline.json"


@dataclass
class Pair:
    """One line: by round, ms of a step and CPU ms of a rank's step, off and on."""

    label: str
    ms: list[tuple[float, float]] = field(default_factory=list)
    cpu: list[tuple[float, float]] = field(default_factory=list)
    nbytes: int = 0
    """Bytes of the file per step of all ranks."""

    @property
    def ratio(self) -> float:
        """Of the time of a step."""
        return median(on / off for off, on in self.ms)

    @property
    def cpu_ratio(self) -> float:
        """Of the processor time of a step."""
        return median(on / off for off, on in self.cpu)

    def as_json(self) -> dict[str, Any]:
        """What the table shows, and the rounds."""
        return {
            "label": self.label,
            "ratio": self.ratio,
            "cpu_ratio": self.cpu_ratio,
            "bytes_per_step": self.nbytes,
            "rounds_ms": self.ms,
            "rounds_cpu_ms": self.cpu,
        }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure line by line, and print one table."""
    options = _parser().parse_args(arguments)
    about = machine.describe()
    console = Console() if sys.stdout.isatty() else Console(width=100)
    for name, value in about.items():
        console.print(f"{name:>9}  {value}", highlight=False, soft_wrap=True)
    neighbours, pairs = Neighbours(), []
    for config in options.config:
        for zero in options.rows:
            pairs.append(_measured(config, zero, options))
            if options.json:
                whole = {"machine": about, "target": TARGET}
                machine.write_json(options.json, whole | {"lines": [p.as_json() for p in pairs]})
    console.print(_table(pairs, options.ranks))
    console.print(remark(neighbours.share()), highlight=False)
    return 0


def _measured(config: str, zero: int, options: argparse.Namespace) -> Pair:
    """Start both, warm them up, and give each its turn in every round, the first in turn first."""
    off = contenders.row(zero, options.transport)
    on = replace(off, environment={"SHARDWISE_TIMELINE": FILE})
    pair = Pair(f"{config}, {off.label}")
    with ExitStack() as alive:
        crews = [
            alive.enter_context(Crew(one, _workload(config), options.ranks, options.limit))
            for one in (off, on)
        ]
        before = [crew.take(WARM_UP).told for crew in crews]
        written = _length(crews[1].file(FILE))
        for number in range(options.rounds):
            ms, cpu = [0.0, 0.0], [0.0, 0.0]
            for which in (0, 1) if number % 2 == 0 else (1, 0):
                stint = crews[which].take(options.steps + 1)
                ms[which] = median(step_times(stint.ends))
                used = [now["used"]["cpu"] for now in stint.told]
                used = [
                    u - then["used"]["cpu"] for u, then in zip(used, before[which], strict=True)
                ]
                cpu[which] = sum(used) / len(used) / (options.steps + 1)
                before[which] = stint.told
            pair.ms.append((ms[0], ms[1]))
            pair.cpu.append((cpu[0], cpu[1]))
        grown = _length(crews[1].file(FILE)) - written
        pair.nbytes = grown // (options.rounds * (options.steps + 1))
    return pair


def _length(path: Path) -> int:
    """Bytes of a file without the room that it has taken ahead."""
    return len(path.read_bytes().replace(b"  ", b""))


def _cpu(told: Sequence[Mapping[str, Any]]) -> float:
    """ms of all ranks since they began."""
    return sum(each["used"]["cpu"] for each in told)


def _workload(config: str) -> Workload:
    return SMALL if config == SMALL.name else CONFIGURATIONS[config]


def _table(pairs: Sequence[Pair], ranks: int) -> Table:
    table = Table(title=f"{ranks} rank(s)", box=SIMPLE, title_justify="left")
    table.add_column("")
    for name in ("ms off", "ms on", "ratio", "CPU ms off", "CPU ms on", "CPU ratio", "KB/step"):
        table.add_column(name, justify="right")
    for pair in pairs:
        cells = [*_sides(pair.ms), f"{pair.ratio:.3f}", *_sides(pair.cpu), f"{pair.cpu_ratio:.3f}"]
        table.add_row(pair.label, *cells, f"{pair.nbytes / 1e3:.1f}")
    table.caption = f"The target is {TARGET}."
    return table


def _sides(rounds: Sequence[tuple[float, float]]) -> list[str]:
    return [f"{median(side):.2f}" for side in zip(*rounds, strict=True)]


def _parser() -> argparse.ArgumentParser:
    summary, _, method = __doc__.partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=method, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--config", type=lambda text: text.split(","), default=["A", "small"], metavar="A,small"
    )
    parser.add_argument("--ranks", type=int, default=2, metavar="N")
    parser.add_argument(
        "--rows", type=lambda text: [int(word) for word in text.split(",")], default=[0, 3]
    )
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--rounds", type=int, default=20, metavar="N")
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="timed, per round")
    parser.add_argument("--limit", type=float, default=120.0, metavar="S", help="per turn")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    return parser


if __name__ == "__main__":
    sys.exit(main())
