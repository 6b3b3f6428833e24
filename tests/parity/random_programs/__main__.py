"""Compares random programs with plain PyTorch.

python -m tests.parity.random_programs --programs 1000 --seed 1     seeds 1 to 1000
python -m tests.parity.random_programs --program 17                 one program, with details
python -m tests.parity.random_programs --shrink 17                  the smallest with that result
python -m tests.parity.random_programs --file program.py            a program from a file
"""

import sys
import time
from collections import Counter
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from tests.disk import make_own, remove_own
from tests.distributed.group import Groups
from tests.parity.random_programs import program as written
from tests.parity.random_programs.drawing import draw
from tests.parity.random_programs.program import Program, readable
from tests.parity.random_programs.running import LIMIT, Counts, PlainSide, Result, Runner
from tests.parity.random_programs.shrinking import shrink

COMMAND = "python -m tests.parity.random_programs"
COLOURS = {"equal": "green", "refused": "yellow"}

console = Console(soft_wrap=True, highlight=False)


def run_many(runner: Runner, first: int, programs: int, *, all_refusals: bool) -> bool:
    """Run programs one after the other, and return whether all were fine."""
    counts, began, examples = Counts(), time.monotonic(), dict[str, list[int]]()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task("programs", total=programs)
        for seed in range(first, first + programs):
            program = draw(seed)
            result = runner(program)
            counts.add(program, result)
            if not result.fine:
                examples.setdefault(f"{result.kind}: {result.reason}", []).append(seed)
                if result.kind != "refused" or all_refusals:
                    progress.console.print(said(seed, result), markup=False)
            told = ", ".join(f"{n} {kind}" for kind, n in counts.by_kind.items() if n)
            progress.update(task, advance=1, description=told)
    show(counts, examples, time.monotonic() - began)
    return not examples


def said(seed: int, result: Result) -> str:
    """Return a result in two lines."""
    return f"{result.kind}: {result.words[:300]}\n    {COMMAND} --program {seed}"


def show(counts: Counts, examples: dict[str, list[int]], seconds: float) -> None:
    """Print the table of all results."""
    table = Table(title=f"{sum(counts.by_kind.values())} programs in {seconds:.0f} s")
    table.add_column("")
    table.add_column("programs", justify="right")
    table.add_column("seeds")
    for kind, count in counts.by_kind.items():
        table.add_row(kind, str(count), "")
    table.add_row("configurations", str(len(counts.configurations)), "")
    table.add_section()
    right = Counter(counts.refusals)
    for key, seeds in sorted(examples.items(), key=lambda item: -len(item[1])):
        table.add_row(key, str(len(seeds)), " ".join(map(str, seeds[:6])))
        right.pop(key.removeprefix("refused: "), None)
    for words, count in right.most_common():
        table.add_row(f"rightly refused: {words}", str(count), "")
    console.print(table)


def run_one(runner: Runner, program: Program, *, smallest: bool) -> bool:
    """Run one program, print its details, and return whether it was fine."""
    console.print(readable(program), markup=False)
    result = runner(program)
    console.print(f"\n{result.kind}: {result.words}", style=COLOURS.get(result.kind, "red"))
    console.print(result.story, markup=False)
    if smallest and not result.fine:
        left = shrink(program, lambda smaller: runner(smaller).is_like(result))
        console.print("\nThe smallest program with this outcome:\n", style="bold")
        console.print(readable(left), markup=False)
        console.print(runner(left).words, markup=False)
    return result.fine


@click.command(help=__doc__.replace("\n    python", "\n\n    python"))
@click.option("--programs", default=100, help="How many to run.")
@click.option("--seed", default=1, help="The first one's seed.")
@click.option("--program", type=int, help="Run the one of this seed, and show all of it.")
@click.option("--shrink", "smaller", type=int, help="Find the smallest that goes like this one.")
@click.option("--file", type=click.Path(exists=True, path_type=Path), help="One written out.")
@click.option("--limit", default=LIMIT, help="Seconds that a phase may take.")
@click.option("--all", "everything", is_flag=True, help="Show each refusal as well.")
def main(
    programs: int,
    seed: int,
    program: int | None,
    smaller: int | None,
    file: Path | None,
    limit: float,
    everything: bool,
) -> None:
    make_own()
    groups, plain = Groups(), PlainSide()
    try:
        runner = Runner(groups, plain, limit)
        if file is not None:
            fine = run_one(runner, eval(file.read_text(), vars(written)), smallest=False)
        elif program is not None or smaller is not None:
            chosen = draw(smaller if program is None else program)
            fine = run_one(runner, chosen, smallest=smaller is not None)
        else:
            fine = run_many(runner, seed, programs, all_refusals=everything)
    finally:
        plain.close()
        groups.close()
        remove_own()
    sys.exit(not fine)


if __name__ == "__main__":
    main()
