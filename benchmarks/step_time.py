"""Step time and resident set of every row of Shardwise beside its peers, in one run.

    python benchmarks/step_time.py --config A,C,R --ranks 2,4 --rows 0,1,2,3 --disk DIR \\
        --peers apart,ddp,zro,fsdp2,deepspeed,accelerate,lightning \\
        --json benchmarks/results/today.json --plot today.png

All train the same model from the same weights on the same batches, in fp32 with torch's fused
AdamW and one thread per rank; the loss after the same number of steps is shown, and the run fails
when two differ in the fourth decimal.

A machine is never quiet, and it drifts by more than the contenders differ. So they take turns: in
each round everyone is started, warms up, takes a few timed steps and leaves, another one first
each time. Figures are medians over the rounds, ratios are taken within a round. Starting afresh
is chosen over holding all alive between turns (--keep) because a start is itself a throw of the
dice - where buffers lie, which pages are huge - that would otherwise be thrown once per contender
and look like a property of it; because no idle thread of another can disturb; and because ten
contenders at four ranks do not fit into memory. --keep is quicker, for a look.

A step lasts from the moment the last rank ended one to the moment the last rank ended the next.
The limit is the step of one process with one thread on the whole batch, divided by the cores that
the ranks can use: what remains if nothing but the arithmetic costs anything. *Ranks, no exchange*
are as many processes, each on its rows, that update a part each and send nothing.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import contenders
import machine
import report
import workloads
from crew import Crew
from figures import Line
from neighbours import Neighbours
from report import Result
from rounds import Plan, measure
from workloads import SIZES, Workload


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; 1 when a contender failed or the losses differ."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        disk = str(options.disk.resolve()) if options.disk else None
        takers = contenders.chosen(options.peers, options.rows, options.transport, disk)
        cases = _cases(options)
    except ValueError as error:
        parser.error(str(error))
    if options.plot and find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install 'shardwise[examples]'.")
    about = machine.describe()
    console = _console()
    for name, value in about.items():
        console.print(f"{name:>9}  {value}", highlight=False, soft_wrap=True)
    try:
        results = _run(takers, cases, options, console, about)
    except KeyboardInterrupt:
        console.print("Interrupted; what was measured is written.")
        return 130
    faults = report.faults(results)
    for fault in faults:
        console.print(fault, style="red", highlight=False, soft_wrap=True, markup=False)
    return 1 if faults else 0


def _run(
    takers: Sequence[contenders.Contender],
    cases: Sequence[tuple[Workload, int]],
    options: argparse.Namespace,
    console: Console,
    about: dict[str, str],
) -> list[Result]:
    """Measure case after case; a table is printed when it is complete, and figures are written
    after every round: a run that is cut leaves what it measured."""
    plan = _plan(options)
    results: list[Result] = []
    with _progress(console) as progress:
        task = progress.add_task("", total=len(cases) * plan.rounds * len(takers))
        for workload, ranks in cases:
            neighbours, before = Neighbours(), len(results)

            def kept(lines: list[Line], w=workload, r=ranks, n=neighbours, b=before) -> None:
                results[b:] = [Result(w, r, machine.cores(), lines, n.share())]
                _write_figures(results, about, options)

            measure(
                takers,
                plan,
                lambda who, w=workload, r=ranks: Crew(who, w, r, options.limit),
                _teller(progress, task, f"{workload.name}, {ranks} ranks"),
                kept,
            )
            console.print(report.table(results[-1]))
            console.print(report.remarks(results[-1]) + "\n", highlight=False, soft_wrap=True)
            _draw(results, about, options)
    return results


def _teller(progress: Progress, task: Any, case: str) -> Callable[[str], None]:
    begun = progress.tasks[task].completed

    def told(turn: str) -> None:
        nonlocal begun
        progress.update(task, completed=begun, description=f"{case}, {turn}")
        begun += 1

    return told


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )


def _console() -> Console:
    """The screen; written to a file, the tables keep a width that fits them."""
    return Console() if sys.stdout.isatty() else Console(width=110)


def _plan(options: argparse.Namespace) -> Plan:
    return Plan(rounds=options.rounds, steps=options.steps, keep=options.keep)


def _write_figures(
    results: Sequence[Result], about: dict[str, str], options: argparse.Namespace
) -> None:
    if options.json:
        machine.write_json(options.json, report.as_json(results, about, asdict(_plan(options))))


def _draw(results: Sequence[Result], about: dict[str, str], options: argparse.Namespace) -> None:
    if options.plot:
        import plot  # matplotlib is only needed for this

        plot.save(results, options.plot, f"{about['machine']} · {about['versions']}")


def _cases(options: argparse.Namespace) -> list[tuple[Workload, int]]:
    """The configurations as the flags change them, at each number of ranks."""
    given = {name: getattr(options, name) for name in SIZES if getattr(options, name) is not None}
    unknown = [name for name in options.config if name not in workloads.CONFIGURATIONS]
    if unknown:
        known = ", ".join(workloads.CONFIGURATIONS)
        raise ValueError(f"No such configuration: {', '.join(unknown)}. There are {known}.")
    chosen = [workloads.CONFIGURATIONS[name] for name in options.config]
    if alien := [name for name in given if not any(hasattr(each, name) for each in chosen)]:
        raise ValueError(f"No chosen configuration has a --{alien[0]}.")
    chosen = [workloads.changed(workload, given) for workload in chosen]
    cases = [(workload, ranks) for workload in chosen for ranks in options.ranks]
    for workload, ranks in cases:
        workloads.check(workload, ranks)
    return cases


def _parser() -> argparse.ArgumentParser:
    summary, _, method = __doc__.partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=method, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=words, default=["A", "C", "R"], metavar="A,C,R")
    parser.add_argument("--ranks", type=numbers, default=[2, 4], metavar="2,4")
    parser.add_argument("--rows", type=numbers, default=[0, 1, 2, 3], metavar="0,1,2,3")
    parser.add_argument("--transport", type=words, default=["auto"], metavar="auto,gloo")
    parser.add_argument("--disk", type=Path, metavar="DIR", help="rows with states on a disk too")
    parser.add_argument("--peers", type=words, default=list(contenders.PEERS), metavar="ddp,...")
    parser.add_argument("--rounds", type=positive, default=5, metavar="N")
    parser.add_argument("--steps", type=positive, default=5, metavar="N", help="timed, per round")
    parser.add_argument("--keep", action="store_true", help="hold all alive between their turns")
    parser.add_argument(
        "--limit", type=float, default=300.0, metavar="S", help="per turn, then fail"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw them (PNG, SVG or PDF)")
    sizes = parser.add_argument_group("any other configuration: change the named one")
    for name in SIZES:
        sizes.add_argument(f"--{name}", type=positive, metavar="N")
    return parser


def words(text: str) -> list[str]:
    """A flag's value `a,b`."""
    return [word for word in text.split(",") if word not in ("", "none")]


def numbers(text: str) -> list[int]:
    """A flag's value `1,2`."""
    return [int(word) for word in words(text)]


def positive(text: str) -> int:
    """A flag's value from 1 on."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is below 1")
    return number


if __name__ == "__main__":
    sys.exit(main())
