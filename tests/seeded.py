"""Code that seeded commands share: it runs trials in sequence, counts them and prints a table.

    python -m tests.NAME --THINGS 1000 --seed 1     seeds 1 to 1000
    python -m tests.NAME --THING 17                 a single seed, with all details

Used by tests.checkpoint_damage, tests.bad_input, tests.random_faults, tests.save_kills,
tests.data_kills and tests.bit_flips.
"""

import math
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from tests.distributed.group import Groups

console = Console(soft_wrap=True, highlight=False)


@dataclass(frozen=True, kw_only=True)
class Result:
    """The result of a trial.

    `kind` is the kind of result, one of the command's. `of` is the kind of thing that was tried,
    `words` a short description, and `story` all details.
    """

    kind: str
    of: str
    words: str = ""
    story: str = ""
    seconds: float = 0.0


Trial = Callable[[int], Result]


@dataclass
class Counts:
    """The counts of all results."""

    kinds: Counter[str] = field(default_factory=Counter)
    by_thing: dict[str, Counter[str]] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)

    def add(self, result: Result) -> None:
        """Add one result."""
        self.kinds[result.kind] += 1
        self.by_thing.setdefault(result.of, Counter())[result.kind] += 1
        self.seconds.append(result.seconds)


@contextmanager
def in_folder(create: Callable[[Path], Trial]) -> Iterator[Trial]:
    """Yield the trial that `create` returns for a new folder, which is removed at the end."""
    with tempfile.TemporaryDirectory(prefix="trials-") as folder:
        yield create(Path(folder))


@contextmanager
def with_ranks(create: Callable[[Groups, Path], Trial]) -> Iterator[Trial]:
    """Like `in_folder`, but also pass warm groups of ranks."""
    with closing(Groups()) as groups, in_folder(partial(create, groups)) as trial:
        yield trial


@dataclass(frozen=True, kw_only=True)
class Command:
    """A seeded command of the module `name`, which tries `things`, each called a `thing`.

    `fine` lists the kinds of results that are promised, `wrong` the kinds that are not.
    """

    name: str
    about: str
    thing: str
    things: str
    fine: Sequence[str]
    wrong: Sequence[str]

    @property
    def kinds(self) -> tuple[str, ...]:
        """All kinds of results."""
        return (*self.fine, *self.wrong)

    def again(self, seed: int) -> str:
        """Return the command that repeats the trial of `seed`."""
        return f"python -m tests.{self.name} --{self.thing} {seed}"

    def failures(self, trial: Trial, seeds: Iterable[int], counts: Counts | None = None) -> str:
        """Run the trials of `seeds` in a test, and describe all failures.

        Adds results to `counts`.
        """
        told = []
        for seed in seeds:
            result = trial(seed)
            if counts is not None:
                counts.add(result)
            if result.kind not in self.fine:
                told.append(f"{self._said(seed, result)}\n{result.story}")
        return "\n".join(told)

    def _said(self, seed: int, result: Result) -> str:
        return f"{result.kind}: {result.words[:400]}\n    {self.again(seed)}"

    def many(self, trial: Trial, first: int, count: int, seconds: float = math.inf) -> bool:
        """Run trials in sequence for up to `seconds`, and return whether all were fine."""
        counts, began, fine = Counts(), time.monotonic(), True
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
            task = progress.add_task(self.things, total=count)
            with suppress(KeyboardInterrupt):  # show the trials so far
                for seed in range(first, first + count):
                    result = trial(seed)
                    counts.add(result)
                    if result.kind not in self.fine:
                        fine = False
                        progress.console.print(self._said(seed, result), markup=False)
                    progress.update(task, advance=1)
                    if time.monotonic() - began > seconds:
                        break
        self._show(counts, time.monotonic() - began)
        return fine

    def _show(self, counts: Counts, seconds: float) -> None:
        """Print a table of results, with a row for each kind of thing."""
        times = sorted(counts.seconds) or [0.0]
        total, median = len(counts.seconds), times[len(times) // 2]
        title = f"{total} {self.things} in {seconds:.0f} s; each {median:.1f} s (median)"
        table = Table(title=f"{title} to {times[-1]:.1f} s")
        table.add_column(self.thing)
        shown = [kind for kind in self.kinds if kind in self.fine or counts.kinds[kind]]
        for kind in shown:
            table.add_column(kind, justify="right")
        for thing, found in sorted(counts.by_thing.items()):
            table.add_row(thing, *(str(found[kind] or "") for kind in shown))
        table.add_section()
        table.add_row("all", *(str(counts.kinds[kind]) for kind in shown))
        console.print(table)

    def run(self, prepared: Callable[[], AbstractContextManager[Trial]]) -> None:
        """Run the command line, with the trial that `prepared` returns."""

        @click.command(help=self.about.replace("\npython", "\n\npython"))
        @click.option(f"--{self.things}", "count", default=100, help="How many to try.")
        @click.option("--seed", default=1, help="The first one's seed.")
        @click.option("--seconds", default=math.inf, help="Try no more after so many seconds.")
        @click.option(f"--{self.thing}", "one", type=int, help="Try the one of this seed.")
        def main(count: int, seed: int, seconds: float, one: int | None) -> None:
            with prepared() as trial:
                if one is None:
                    fine = self.many(trial, seed, count, seconds)
                else:
                    result = trial(one)
                    fine = result.kind in self.fine
                    console.print(f"{result.kind}: {result.words}\n{result.story}", markup=False)
            sys.exit(not fine)

        main()
