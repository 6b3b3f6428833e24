"""Checkpoints damaged in every way, and what is made of them.

python -m tests.checkpoint_damage --damages 1000 --seed 1     seeds 1 to 1000
python -m tests.checkpoint_damage --damage 17                 that one, and all about it
"""

import sys
import tempfile
import time
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from tests.checkpoint_damage.judging import FINE, KINDS, Counts, Result, Runner
from tests.distributed.group import Groups

COMMAND = "python -m tests.checkpoint_damage"

console = Console(soft_wrap=True, highlight=False)


def run_many(runner: Runner, first: int, damages: int) -> bool:
    """One after the other; whether all were fine."""
    counts, began, fine = Counts(), time.monotonic(), True
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task("damages", total=damages)
        for seed in range(first, first + damages):
            result = runner(seed)
            counts.add(result)
            if not result.fine:
                fine = False
                progress.console.print(said(seed, result), markup=False)
            progress.update(task, advance=1)
    show(counts, time.monotonic() - began)
    return fine


def said(seed: int, result: Result) -> str:
    """A result in two lines."""
    return f"{result.kind}: {result.words[:400]}\n    {COMMAND} --damage {seed}"


def show(counts: Counts, seconds: float) -> None:
    """The table of all results: kinds of damages by what came of them."""
    total = sum(counts.kinds.values())
    title = f"{total} damages in {seconds:.0f} s, {counts.slowest:.1f} s the slowest"
    table = Table(title=title)
    table.add_column("damage")
    shown = [kind for kind in KINDS if kind in FINE or counts.kinds[kind]]
    for kind in shown:
        table.add_column(kind, justify="right")
    for damage, found in sorted(counts.by_damage.items()):
        table.add_row(damage, *(str(found[kind] or "") for kind in shown))
    table.add_section()
    table.add_row("all", *(str(counts.kinds[kind]) for kind in shown))
    console.print(table)


@click.command(help=__doc__.replace("\n    python", "\n\n    python"))
@click.option("--damages", default=100, help="How many to try.")
@click.option("--seed", default=1, help="The first one's seed.")
@click.option("--damage", type=int, help="Try the one of this seed, and show all of it.")
def main(damages: int, seed: int, damage: int | None) -> None:
    groups = Groups()
    with tempfile.TemporaryDirectory(prefix="damaged") as folder:
        try:
            runner = Runner(groups(2), Path(folder))
            if damage is None:
                fine = run_many(runner, seed, damages)
            else:
                result = runner(damage)
                fine = result.fine
                console.print(f"{result.kind}: {result.words}\n{result.story}", markup=False)
        finally:
            groups.close()
    sys.exit(not fine)


if __name__ == "__main__":
    main()
