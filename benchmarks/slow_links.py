"""Two islands with one rank each at the ends of a slow link: seconds and bytes per step.

    python benchmarks/slow_links.py --rates 10,100,none --json FILE
    python benchmarks/slow_links.py --rates 10,100 --formulas          # by arithmetic, at once

Each rank is in a separate network namespace (needs root); between them tbf limits the rate at
which each end sends, and nothing else: latency is not simulated. Bytes are counted by the
interfaces, and stand next to the method's formula. A contender starts and takes its first steps
before the link is limited, so that no step of the start is timed.

Methods that send in every step are timed over some steps, methods that send every H steps over H
neighbouring ones, of which one sends; with --late over H steps after H steps that fill the link.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from time import monotonic

import figure
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
    """The figures of one contender at one rate; bytes as the interface of one end counts them.
    `note` says why it has no figures."""

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
    """Bytes of all timed steps without a boundary and its neighbours, the most of a round."""
    note: str = ""

    @property
    def median(self) -> float | None:
        """Seconds per step: the median over the rounds."""
        return median(self.seconds) if self.seconds else None


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and keep; 1 if a contender failed."""
    parser = _parser()
    options = parser.parse_args(arguments)
    sizes = figure.sizes_in(options)
    workload = workloads.changed(workloads.CONFIGURATIONS[options.config], sizes)
    assert isinstance(workload, Gpt)
    takers = field_of.chosen(options.contenders, workload, options.every, options.late)
    if not takers:
        parser.error(f"none of {','.join(options.contenders)} is one of {field_of.NAMES}")
    facts, neighbours = figure.begin(), Neighbours()
    method = {name: getattr(options, name) for name in ("every", "late", "rounds")}
    lines = {(rate, t.key): _line(t, rate) for rate in options.rates for t in takers}
    if options.formulas:
        figure.show(*_arithmetic(takers, options.rates))
        return 0
    try:
        for number in range(options.rounds):
            for rate in options.rates:
                for taker in takers:
                    turn = f"round {number + 1}: {taker.label} at {_rate(rate)}"
                    print(turn, file=sys.stderr, flush=True)
                    _turn(lines[rate, taker.key], taker, workload, options)
                    figure.keep(
                        options,
                        facts,
                        configuration=workloads.told(workload),
                        method=method,
                        share_of_other_processes=neighbours.share(),
                        results=[asdict(x) | {"median_s": x.median} for x in lines.values()],
                    )
    except NoNamespaces as error:
        parser.error(f"this needs network namespaces: {error}")
    for rate in options.rates:
        figure.show("", *_table(list(lines.values()), rate))
    figure.show("", remark(neighbours.share()))
    failed = [line for line in lines.values() if line.note]
    figure.show(*(f"{line.label} at {_rate(line.rate)}: {line.note}" for line in failed))
    return 1 if any(line.note.startswith("failed") for line in failed) else 0


def _line(taker: Sender, rate: float | None) -> Line:
    formula = on_the_wire(taker.payload) / taker.every
    return Line(taker.key, taker.label, rate, taker.every, formula)


def _arithmetic(takers: Sequence[Sender], rates: Sequence[float | None]) -> list[str]:
    """Return the seconds per step that the bytes of the formulas take on the link. No step is
    shorter, except with --late, where bytes pass during the computation."""
    limits = [rate for rate in rates if rate is not None]
    rows = []
    for taker in takers:
        nbytes = _line(taker, None).formula
        seconds = [f"{nbytes * 8 / (rate * 1e6):.3f}" for rate in limits]
        rows.append([taker.label, f"{nbytes / 1e6:.3f}", *seconds])
    return figure.table(["two islands", "MB/step", *(f"s at {_rate(r)}" for r in limits)], rows)


def _turn(line: Line, taker: Sender, workload: Gpt, options: argparse.Namespace) -> None:
    """Start a contender and time it; one that failed once is not tried again."""
    if line.note:
        return
    try:
        with (
            Link() as link,
            Crew(taker.contender, workload, 2, options.limit, link=link) as crew,
        ):
            stints = _Stints(crew, link)
            stints.take(WARM_UP)
            # Not before: at 10 Mbit/s the broadcast of the first weights takes a minute.
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
    """The steps that a crew took: when each ended, and the bytes of each stint."""

    def __init__(self, crew: Crew, link: Link) -> None:
        self._crew, self._link = crew, link
        self._ends: list[list[int]] = [[], []]

    def take(self, steps: int) -> int:
        """Take some steps; return the bytes that one end has sent meanwhile, the larger of both."""
        before = self._link.sent()
        for known, new in zip(self._ends, self._crew.take(steps).ends, strict=True):
            known += new
        return max(b - a for a, b in zip(before, self._link.sent(), strict=True))

    def seconds(self, last: int) -> float:
        """Return the seconds per step over the `last` ones."""
        return sum(step_times(self._ends)[-last:]) / last / 1e3


def _steady(line: Line, stints: _Stints, options: argparse.Namespace) -> None:
    """Time steps that are all the same, fewer if they are slow."""
    begun, counted = monotonic(), [stints.take(1)]
    while len(counted) < options.steps and (
        len(counted) < LEAST or monotonic() - begun < options.seconds
    ):
        # One by one, so that a slow method stops after `--seconds`.
        counted.append(stints.take(1))
    line.seconds.append(stints.seconds(len(counted)))
    line.bytes.append(sum(counted) / len(counted))


def _periodic(line: Line, taker: Sender, stints: _Stints) -> None:
    """Time as many neighbouring steps as a period has."""
    if taker.late:  # fragments are in flight at any time: let the link fill up first
        stints.take(taker.every)
        sent = stints.take(taker.every)
    else:
        # WARM_UP steps are over, so step number `every`, the boundary, is the next one after these.
        between = stints.take(taker.every - WARM_UP - 1)
        sent = between + stints.take(WARM_UP + 1)
        line.between = max(between, line.between or 0)
    line.seconds.append(stints.seconds(taker.every))
    line.bytes.append(sent / taker.every)


def _table(lines: Sequence[Line], rate: float | None) -> list[str]:
    """Return the table of one rate, with the speed over DDP's and over that without a limit."""
    here = [line for line in lines if line.rate == rate]
    free = {line.key: line.median for line in lines if line.rate is None}
    ddp = next((line.median for line in here if line.key == "ddp"), None)
    rows = []
    for line in here:
        if line.median is None:
            rows.append([line.label, line.note.partition(":")[0]])
            continue
        sent, alone = median(line.bytes), free.get(line.key)
        rows.append(
            [
                line.label,
                f"{line.median:.3f}",
                f"{ddp / line.median:.1f}" if ddp else "",
                f"{alone / line.median:.0%}" if alone else "",
                f"{sent / 1e6:.3f}",
                f"{line.formula / 1e6:.3f}",
                f"{sent / line.formula:.3f}",
                "" if line.between is None else str(line.between),
            ]
        )
    names = ["s/step", "x DDP", "of no limit", "MB/step", "formula", "ratio", "B between"]
    return figure.table([f"two islands, {_rate(rate)}", *names], rows)


def _rate(rate: float | None) -> str:
    return "no limit" if rate is None else f"{rate:g} Mbit/s"


def _rates(text: str) -> list[float | None]:
    return [None if word == "none" else float(word) for word in text.split(",")]


def _parser() -> argparse.ArgumentParser:
    parser = figure.parser(__doc__)
    add = parser.add_argument
    named = f"of {', '.join(field_of.NAMES)}"
    add("--config", default="A", choices=["A", "C"])
    add("--rates", type=_rates, default="10,100,none", metavar="MBIT,...")
    add("--contenders", type=figure.words, default=["all"], metavar="NAME,...", help=named)
    add("--every", type=int, default=30, metavar="H", help="30")
    add("--late", type=int, default=10, metavar="T", help="10")
    add("--rounds", type=int, default=1)
    add("--steps", type=int, default=10, help="of those that send in each")
    add("--seconds", type=float, default=60.0, help="or until these are over")
    add("--limit", type=float, default=1800.0, help="seconds for each stint")
    add("--formulas", action="store_true", help="run nothing")
    figure.add_sizes(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
