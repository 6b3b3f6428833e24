"""Strong scaling: the same batch on more and more ranks, beside one process.

    python benchmarks/scaling.py --config A --ranks 1,2,4,8 --rows 0,3 --peers ddp,fsdp2 \\
        --rounds 5 --steps 5 --json FILE --plot FILE

The total batch stays as it is; every rank has one thread. In each round everyone takes a turn at
every number of ranks. Speed-up is the step of one plain process over the contender's of the same
round; a machine can give no more than it has cores, which the plot shows as a line.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

import contenders
import machine
import workloads
from contenders import PLAIN, Contender
from crew import Crew, CrewFailed, NotInstalled
from figures import step_times
from neighbours import Neighbours, remark
from report import milliseconds
from rounds import WARM_UP
from workloads import Gpt, Workload

BATCH = 8
"""Rows of a total batch that 8 ranks can cut."""


@dataclass
class Curve:
    """One contender: by number of ranks, the median ms of a step of each round."""

    label: str
    ms: dict[int, list[float]] = field(default_factory=dict)
    note: str = ""

    def speed_up(self, ranks: int, alone: Sequence[float]) -> float | None:
        """How much faster than one process, within a round and then the median over the rounds."""
        pairs = zip(alone, self.ms.get(ranks, []), strict=False)
        found = [whole / part for whole, part in pairs]
        return median(found) if found else None


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and keep; 1 when a contender failed."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        workload = _workload(options.config)
        takers = contenders.chosen(options.peers, options.rows)[1:]
        for ranks in options.ranks:
            workloads.check(workload, ranks)
    except (KeyError, ValueError) as error:
        parser.error(str(error))
    about, neighbours = machine.describe(), Neighbours()
    console = Console() if sys.stdout.isatty() else Console(width=110)
    for name, value in about.items():
        console.print(f"{name:>9}  {value}", highlight=False, soft_wrap=True)
    curves = {taker.key: Curve(taker.label) for taker in [PLAIN, *takers]}
    for number in range(options.rounds):
        for taker, ranks in _turns(takers, options.ranks, number):
            _turn(curves[taker.key], taker, workload, ranks, options)
        _keep(curves, workload, about, options)
    console.print(_table(list(curves.values()), workload, options.ranks))
    console.print(remark(neighbours.share()), highlight=False)
    if options.plot:
        import plot  # matplotlib is only needed for this

        alone = curves[PLAIN.key].ms.get(1, [])
        shown = {
            curve.label: {n: curve.speed_up(n, alone) for n in options.ranks}
            for curve in list(curves.values())[1:]
        }
        plot.scaling(shown, machine.cores(), options.plot, f"{about['machine']}, {workload.name}")
    failed = [curve for curve in curves.values() if curve.note.startswith("failed")]
    for curve in failed:
        console.print(f"{curve.label}: {curve.note}", markup=False, highlight=False)
    return 1 if failed else 0


def _workload(name: str) -> Workload:
    found = workloads.CONFIGURATIONS[name]
    return replace(found, batch=BATCH) if isinstance(found, Gpt) else found


def _turns(
    takers: Sequence[Contender], sizes: Sequence[int], by: int
) -> Iterator[tuple[Contender, int]]:
    """Everyone at every number of ranks, one process first; another one begins each round."""
    yield PLAIN, 1
    whole = [(taker, ranks) for ranks in sizes for taker in takers]
    by %= len(whole)
    yield from whole[by:] + whole[:by]


def _turn(
    curve: Curve, taker: Contender, workload: Workload, ranks: int, options: argparse.Namespace
) -> None:
    """One start of a contender, its steps timed; one that failed once is not tried again."""
    if curve.note:
        return
    try:
        with Crew(taker, workload, ranks, options.limit) as crew:
            stint = crew.take(WARM_UP + options.steps)
        curve.ms.setdefault(ranks, []).append(median(step_times(stint.ends)[WARM_UP - 1 :]))
    except NotInstalled as error:
        curve.note = f"not installed: {error}"
    except CrewFailed as error:
        curve.note = f"failed at {ranks} ranks: {error}"


def _keep(
    curves: dict[str, Curve], workload: Workload, about: dict[str, str], options: argparse.Namespace
) -> None:
    if options.json:
        lines: dict[str, Any] = {
            key: {"label": curve.label, "note": curve.note, "ms": curve.ms}
            for key, curve in curves.items()
        }
        whole = {"machine": about, "configuration": workloads.told(workload), "contenders": lines}
        machine.write_json(options.json, whole)


def _table(curves: Sequence[Curve], workload: Workload, sizes: Sequence[int]) -> Table:
    table = Table(title=workload.describe(), box=SIMPLE, title_justify="left")
    table.add_column("ms/step (speed-up)", no_wrap=True)
    for ranks in sizes:
        table.add_column(f"{ranks} ranks" if ranks > 1 else "1 rank", justify="right")
    alone = curves[0].ms.get(1, [])
    for curve in curves:
        cells = []
        for ranks in sizes:
            times, faster = curve.ms.get(ranks), curve.speed_up(ranks, alone)
            shown = f"{milliseconds(median(times))} ({faster:.2f})" if times and faster else ""
            cells.append(shown)
        table.add_row(curve.label, *(["", curve.note.partition(":")[0]] if curve.note else cells))
    return table


def _parser() -> argparse.ArgumentParser:
    summary, _, method = __doc__.partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=method, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default="A", choices=list(workloads.CONFIGURATIONS))
    parser.add_argument("--ranks", type=_numbers, default=[1, 2, 4, 8], metavar="1,2,4,8")
    parser.add_argument("--rows", type=_numbers, default=[0, 1, 2, 3], metavar="0,1,2,3")
    parser.add_argument("--peers", type=_words, default=["ddp", "fsdp2"], metavar="ddp,...")
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    parser.add_argument("--steps", type=int, default=5, metavar="N", help="timed, per turn")
    parser.add_argument("--limit", type=float, default=300.0, metavar="S", help="per turn")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw them (PNG, SVG or PDF)")
    return parser


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word not in ("", "none")]


def _numbers(text: str) -> list[int]:
    return [int(word) for word in _words(text)]


if __name__ == "__main__":
    sys.exit(main())
