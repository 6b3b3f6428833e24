"""Step time of the bridges beside their libraries over DDP and FSDP2, and beside the engine's own
loop, in one run.

    python benchmarks/bridges.py --ranks 2,4 --rows 0,3 --rounds 5 --steps 10 \\
        --json benchmarks/results/today-bridges.json

All train the same model from the same weights on the same batches, as in step_time.py, whose method
this is: in each round everyone is started, warms up, takes its timed steps and leaves; figures are
medians over the rounds, ratios are taken within a round; losses are compared. `x DDP` is the step
over that of the same library with DDP, `x FSDP` over its FSDP2, or over torch's own loop with FSDP2
where the library has none on the CPU (transformers' Trainer), and `x engine` over the loop of
`sw.Engine` in the same row. Libraries that own the loop hand their batches over between two threads
(loops.py), with every engine alike.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.table import Table

import contenders
import machine
import report
import workloads
from contenders import LIBRARIES, PEERS, Contender
from crew import Crew
from figures import Line, ratio
from neighbours import Neighbours
from report import Result, milliseconds
from rounds import Budget, Plan, measure
from step_time import _console, _progress, _teller, numbers, positive, words
from workloads import SIZES

COLUMNS = ("ms/step", "x DDP", "x FSDP", "x engine")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; 1 where a contender failed or the losses differ."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if alien := [name for name in options.libraries if name not in LIBRARIES]:
        parser.error(f"No such library: {', '.join(alien)}. There are {', '.join(LIBRARIES)}.")
    given = {name: getattr(options, name) for name in SIZES if getattr(options, name) is not None}
    workload = workloads.changed(workloads.CONFIGURATIONS[options.config], given)
    console, about = _console(), machine.describe()
    for name, value in about.items():
        console.print(f"{name:>9}  {value}", highlight=False, soft_wrap=True)
    plan = Plan(rounds=options.rounds, steps=options.steps)
    takers = chosen(options.libraries, options.rows)
    results: list[Result] = []
    with _progress(console) as progress:
        task = progress.add_task("", total=len(options.ranks) * plan.rounds * len(takers))
        for ranks in options.ranks:
            neighbours, before = Neighbours(), len(results)

            def kept(lines: list[Line], r=ranks, n=neighbours, b=before) -> None:
                results[b:] = [Result(workload, r, machine.cores(), lines, n.share())]
                if options.json:
                    machine.write_json(options.json, as_json(results, about, plan))

            measure(
                takers,
                plan,
                lambda who, r=ranks: Crew(who, workload, r, options.limit),
                _teller(progress, task, f"{ranks} ranks"),
                kept,
                Budget(60 * options.minutes / len(options.ranks)),
            )
            console.print(table(results[-1]))
            console.print(report.remarks(results[-1]) + "\n", highlight=False, soft_wrap=True)
    faults = report.faults(results)
    for fault in faults:
        console.print(fault, style="red", highlight=False, soft_wrap=True, markup=False)
    return 1 if faults else 0


def chosen(libraries: Sequence[str], rows: Sequence[int]) -> list[Contender]:
    """One process, torch's DDP and FSDP2 and the engine's own loops; then the libraries."""
    own = [*PEERS["ddp"], PEERS["fsdp2"][0], *map(contenders.row, rows)]
    bridged = [each for name in libraries for each in contenders.bridged(name, rows)]
    return [contenders.PLAIN, *own, *bridged]


def ratios(result: Result, line: Line) -> list[float | None]:
    """A line over its library's DDP, its FSDP2 or torch's, and the engine in the same row."""
    library, _, row = line.key.rpartition("-")
    if library not in LIBRARIES:
        return [ratio(line, result.line("ddp")), ratio(line, result.line("fsdp2")), None]
    sharded = result.line(f"{library}-fsdp2") or result.line("fsdp2")
    engine = result.line(f"shardwise-{row}") if row.isdigit() else None
    return [ratio(line, result.line(f"{library}-ddp")), ratio(line, sharded), ratio(line, engine)]


def table(result: Result) -> Table:
    """The table as rich draws it."""
    title = f"{result.workload.describe()} · {result.ranks} ranks"
    drawn = Table(box=SIMPLE, title=title, title_justify="left", title_style="bold")
    drawn.add_column("", no_wrap=True)
    for name in (*COLUMNS, f"loss, {result.steps_compared} steps"):
        drawn.add_column(name, justify="right")
    for line in result.lines:
        if line.note:
            drawn.add_row(line.label, line.note.partition(":")[0], style="dim")
            continue
        shown = ["-" if each is None else f"{each:.3f}" for each in ratios(result, line)]
        loss = f"{line.losses[-1]:.4f}" if line.losses else "-"
        style = "bold" if "Shardwise" in line.label else ""
        drawn.add_row(line.label, milliseconds(line.median), *shown, loss, style=style)
    return drawn


def as_json(results: Sequence[Result], about: dict[str, str], plan: Plan) -> Any:
    """Everything that was measured, and the ratios that the tables show."""
    written = report.as_json(results, about, asdict(plan))
    for result, found in zip(results, written["results"], strict=True):
        for line, shown in zip(result.lines, found["contenders"], strict=True):
            names = ("over_its_ddp", "over_its_fsdp", "over_engine")
            shown |= dict(zip(names, ratios(result, line), strict=True))
    return written


def _parser() -> argparse.ArgumentParser:
    summary, _, method = __doc__.partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=method, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", choices=workloads.CONFIGURATIONS, default="A")
    parser.add_argument("--libraries", type=words, default=list(LIBRARIES), metavar="fabric,...")
    parser.add_argument("--ranks", type=numbers, default=[2, 4], metavar="2,4")
    parser.add_argument("--rows", type=numbers, default=[0, 3], metavar="0,3")
    parser.add_argument("--rounds", type=positive, default=5, metavar="N")
    parser.add_argument("--steps", type=positive, default=10, metavar="N", help="timed, per round")
    parser.add_argument(
        "--minutes", type=float, default=math.inf, metavar="M",
        help="leave turns out that would end later; each number of ranks has its share",
    )  # fmt: skip
    parser.add_argument("--limit", type=float, default=300.0, metavar="S", help="per turn")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    sizes = parser.add_argument_group("any other configuration: change the named one")
    for name in SIZES:
        sizes.add_argument(f"--{name}", type=positive, metavar="N")
    return parser


if __name__ == "__main__":
    sys.exit(main())
