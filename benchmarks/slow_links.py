"""Two islands with one rank each at the ends of a slow link: seconds and bytes per step.

    python benchmarks/slow_links.py --rates 10,100,none --json FILE
    python benchmarks/slow_links.py --rates 10,100 --formulas          # by arithmetic, at once

Each rank is in a network namespace of its own (needs root); between them tbf limits what each end
sends. It limits the rate alone: nothing is said of latency. Bytes are those that the interfaces
count, beside what the method's formula says. A contender starts and takes its first steps before
the link is limited: what is timed are steps as they go on.

Methods that send in every step are timed over some steps, those that send every H steps over H
neighbouring ones, of which one sends; with --late over H steps after H steps that fill the link.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

import machine
import slow_links_contenders as field_of
import workloads
from crew import Crew, CrewFailed, DoesNotFit, NotInstalled
from figures import step_times
from link import Link, NoNamespaces, on_the_wire
from neighbours import Neighbours, remark
from rounds import WARM_UP
from slow_links_contenders import Sender
from workloads import Gpt

LEAST = 2
"""Steps that are timed, however slow they are."""


@dataclass
class Line:
    """What one contender showed at one rate; bytes are those of one end, as its interface counts
    them. `note` says why there is nothing to show."""

    key: str
    label: str
    rate: float | None
    every: int
    formula: float
    """Bytes per step, with the headers of full packets."""
    seconds: list[float] = field(default_factory=list)
    """Per step, by round."""
    bytes: list[float] = field(default_factory=list)
    """Per step, by round."""
    between: int | None = None
    """Bytes in all steps timed but those of a boundary and its neighbours, the most of a round."""
    note: str = ""

    @property
    def median(self) -> float | None:
        """Seconds per step: the median over the rounds."""
        return median(self.seconds) if self.seconds else None

    @property
    def sent(self) -> float | None:
        """Bytes per step: the median over the rounds."""
        return median(self.bytes) if self.bytes else None


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and keep; 1 where a contender failed."""
    parser = _parser()
    options = parser.parse_args(arguments)
    sizes = {name: value for name, value in vars(options).items() if name in workloads.SIZES}
    given = {name: value for name, value in sizes.items() if value is not None}
    workload = workloads.changed(workloads.CONFIGURATIONS[options.config], given)
    assert isinstance(workload, Gpt)
    takers = field_of.chosen(options.contenders, workload, options.every, options.late)
    if not takers:
        parser.error(f"none of {','.join(options.contenders)} is one of {field_of.NAMES}")
    about, neighbours, console = machine.describe(), Neighbours(), _console()
    for name, value in about.items():
        console.print(f"{name:>9}  {value}", highlight=False, soft_wrap=True)
    if options.formulas:
        console.print(_arithmetic(takers, options.rates, workload))
        return 0
    lines = {(rate, t.key): _line(t, rate) for rate in options.rates for t in takers}
    try:
        for number in range(options.rounds):
            for rate in options.rates:
                for taker in takers:
                    console.print(f"round {number + 1}: {taker.label} at {_rate(rate)}")
                    _turn(lines[rate, taker.key], taker, workload, options)
                    _keep(list(lines.values()), workload, about, neighbours, options)
    except NoNamespaces as error:
        parser.error(f"this needs network namespaces: {error}")
    for rate in options.rates:
        console.print(_table(list(lines.values()), rate, workload))
    console.print(remark(neighbours.share()), highlight=False)
    failed = [line for line in lines.values() if line.note]
    for line in failed:
        console.print(f"{line.label} at {_rate(line.rate)}: {line.note}", markup=False)
    return 1 if any(line.note.startswith("failed") for line in failed) else 0


def _line(taker: Sender, rate: float | None) -> Line:
    formula = on_the_wire(taker.payload) / taker.every
    return Line(taker.key, taker.label, rate, taker.every, formula)


def _arithmetic(takers: Sequence[Sender], rates: Sequence[float | None], workload: Gpt) -> Table:
    """Seconds per step that the bytes of the formulas take on the link: no step is shorter, except
    that with --late they pass beside the computing."""
    table = Table(box=SIMPLE, title=workload.describe(), title_justify="left")
    table.add_column("two islands, by formula", no_wrap=True)
    limits = [rate for rate in rates if rate is not None]
    for name in ("MB/step", *(f"s at {_rate(rate)}" for rate in limits)):
        table.add_column(name, justify="right")
    for taker in takers:
        nbytes = _line(taker, None).formula
        seconds = [f"{nbytes * 8 / (rate * 1e6):.3f}" for rate in limits]
        table.add_row(taker.label, f"{nbytes / 1e6:.3f}", *seconds)
    return table


def _turn(line: Line, taker: Sender, workload: Gpt, options: argparse.Namespace) -> None:
    """One start of a contender; one that failed once is not tried again."""
    if line.note:
        return
    try:
        with (
            Link() as link,
            Crew(taker.contender, workload, 2, options.limit, link=link) as crew,
        ):
            stints = _Stints(crew, link)
            stints.take(WARM_UP)
            link.limit(line.rate)
            if taker.every > 1:
                _periodic(line, taker, stints)
            else:
                _steady(line, stints, options)
    except NotInstalled as error:
        line.note = f"not installed: {error}"
    except (CrewFailed, DoesNotFit) as error:
        line.note = f"failed: {error}"


class _Stints:
    """The steps that a crew took: when each ended, and what each stint of them has sent."""

    def __init__(self, crew: Crew, link: Link) -> None:
        self._crew, self._link = crew, link
        self._ends: list[list[int]] = [[], []]

    def take(self, steps: int) -> int:
        """Take so many steps; the bytes that one end has sent meanwhile, the larger of both."""
        before = self._link.sent()
        for known, new in zip(self._ends, self._crew.take(steps).ends, strict=True):
            known += new
        return max(b - a for a, b in zip(before, self._link.sent(), strict=True))

    def seconds(self, last: int) -> float:
        """Seconds per step, over the `last` ones."""
        return sum(step_times(self._ends)[-last:]) / last / 1e3


def _steady(line: Line, stints: _Stints, options: argparse.Namespace) -> None:
    """Time steps that are all alike, fewer where they are slow."""
    begun, counted = monotonic(), [stints.take(1)]
    while len(counted) < options.steps and (
        len(counted) < LEAST or monotonic() - begun < options.seconds
    ):
        counted.append(stints.take(1))
    line.seconds.append(stints.seconds(len(counted)))
    line.bytes.append(sum(counted) / len(counted))


def _periodic(line: Line, taker: Sender, stints: _Stints) -> None:
    """Time as many neighbouring steps as a period has."""
    if taker.late:  # fragments travel at any time: let the link be as full as it will be
        stints.take(taker.every)
        sent = stints.take(taker.every)
    else:
        between = stints.take(taker.every - WARM_UP - 1)
        sent = between + stints.take(WARM_UP + 1)
        line.between = max(between, line.between or 0)
    line.seconds.append(stints.seconds(taker.every))
    line.bytes.append(sent / taker.every)


def _keep(
    lines: Sequence[Line],
    workload: Gpt,
    about: dict[str, str],
    neighbours: Neighbours,
    options: argparse.Namespace,
) -> None:
    if not options.json:
        return
    written: dict[str, Any] = {
        "machine": about,
        "configuration": workloads.told(workload),
        "method": {"every": options.every, "late": options.late, "rounds": options.rounds},
        "share_of_other_processes": neighbours.share(),
        "results": [asdict(line) | {"median_s": line.median} for line in lines],
    }
    machine.write_json(options.json, written)


def _table(lines: Sequence[Line], rate: float | None, workload: Gpt) -> Table:
    """One rate; how many times as fast as DDP each is, and its share of its speed without one."""
    here = [line for line in lines if line.rate == rate]
    free = {line.key: line.median for line in lines if line.rate is None}
    title = f"{_rate(rate)}; {workload.describe()}"
    table = Table(box=SIMPLE, title=title, title_justify="left")
    table.add_column("two islands", no_wrap=True)
    names = ("s/step", "x DDP", "of no limit", "MB/step", "formula", "ratio", "B between")
    for name in names:
        table.add_column(name, justify="right")
    ddp = next((line.median for line in here if line.key == "ddp"), None)
    for line in here:
        table.add_row(line.label, *_cells(line, ddp, free.get(line.key)))
    return table


def _cells(line: Line, ddp: float | None, free: float | None) -> list[str]:
    if line.median is None or line.sent is None:
        return [line.note.partition(":")[0]]
    return [
        f"{line.median:.3f}",
        f"{ddp / line.median:.1f}" if ddp else "",
        f"{free / line.median:.0%}" if free else "",
        f"{line.sent / 1e6:.3f}",
        f"{line.formula / 1e6:.3f}",
        f"{line.sent / line.formula:.3f}",
        "" if line.between is None else str(line.between),
    ]


def _rate(rate: float | None) -> str:
    return "no limit" if rate is None else f"{rate:g} Mbit/s"


def _console() -> Console:
    return Console() if sys.stdout.isatty() else Console(width=110)


def _rates(text: str) -> list[float | None]:
    return [None if word == "none" else float(word) for word in text.split(",")]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default="A", choices=["A", "C"])
    parser.add_argument("--rates", type=_rates, default="10,100,none", metavar="MBIT,...")
    parser.add_argument(
        "--contenders",
        type=lambda text: text.split(","),
        default="all",
        metavar="NAME,...",
        help=f"of {', '.join(field_of.NAMES)}",
    )
    parser.add_argument("--every", type=int, default=30, metavar="H", help="30")
    parser.add_argument("--late", type=int, default=10, metavar="T", help="10")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=10, help="of those that send in each")
    parser.add_argument("--seconds", type=float, default=60.0, help="or until these are over")
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds for each stint")
    parser.add_argument("--formulas", action="store_true", help="run nothing")
    parser.add_argument("--json", type=Path, metavar="FILE")
    for name in ("width", "layers", "vocabulary", "sequence", "batch", "heads"):
        parser.add_argument(f"--{name}", type=int)
    return parser


if __name__ == "__main__":
    sys.exit(main())
