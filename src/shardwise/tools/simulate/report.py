"""Reports the result of a simulation, as sentences and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from shardwise.config.outer_optimizer import IslandRule
from shardwise.messages.printable import in_short, many
from shardwise.tools.plan.cluster import Cluster
from shardwise.tools.simulate.failure_classes import DAY, HOUR, Failures
from shardwise.tools.simulate.goodput import Band, Goodput
from shardwise.tools.simulate.outcome import GIVES_UP
from shardwise.tools.simulate.run_model import RunModel, daly, young

NOT_YET = (
    "shardwise run supports less than this so far: a failure stops only one island with "
    "--elastic-islands and without --late; a planned stop, or a failure of the last island, ends "
    "the run; the steps of an absent island are not made up for, but counted here as done later."
)
"""A note that every simulation of islands prints."""


@dataclass(frozen=True, kw_only=True)
class SimulationRequest:
    """The arguments of `shardwise simulate`. Durations are in seconds.

    If `save_every` is None, the simulation searches for the best interval between checkpoints.
    """

    cluster: str
    failures: str
    days: float
    step: float
    jitter: float
    save_every: float | None
    save: float
    background: float
    detect: float | None
    restart: float
    spares: int
    least: int | None
    trials: int
    seed: int
    hardware: tuple[str, ...] = ()
    islands: int | str = 1
    equal_every: int | None = None
    wire: str | None = None
    late: int | None = None
    parameters: float | None = None
    between: float | None = None
    """Bandwidth in Mbit/s of each island's link to the other islands. None ignores the link."""
    reconnect: float | None = None

    @property
    def rule(self) -> IslandRule:
        """The settings of islands, with the same defaults as a run.

        Raises ConfigError if a setting is invalid.
        """
        default = IslandRule()
        return IslandRule(
            every=self.equal_every or default.every,
            wire=self.wire or default.wire,
            late=self.late or default.late,
        )


@dataclass(frozen=True)
class SimulationReport:
    """A simulated run and its result.

    If the simulation searched for the best checkpoint interval, `tried` contains each interval in
    seconds with its goodput.
    """

    request: SimulationRequest
    cluster: Cluster
    failures: Failures
    goodput: Goodput
    tried: list[tuple[float, Band]]
    whole: Goodput | None = None
    """The result of the same run without islands."""

    @property
    def model(self) -> RunModel:
        return self.goodput.model

    @property
    def dollars(self) -> tuple[float, float] | None:
        """The cost in dollars at the lowest and the highest price, including spare hosts.

        None if the catalogue lists no price for the device.
        """
        prices = [self.cluster.device.number(f"dollars_{end}") for end in ("low", "high")]
        # Spare hosts are rented for the entire run, regardless of whether they are used.
        hosts = self.cluster.hosts + self.request.spares
        hours = self.goodput.wall.mean / HOUR * hosts * self.cluster.per_host
        low, high = prices
        return None if low is None or high is None else (low * hours, high * hours)


def headline(report: SimulationReport) -> str:
    """Return the main result in one sentence."""
    goodput, request = report.goodput, report.request
    return (
        f"{request.days / DAY:.4g} days of steps on {report.cluster} take "
        f"{goodput.wall.mean / DAY:.4g} days ({goodput.wall.low / DAY:.4g} to "
        f"{goodput.wall.high / DAY:.4g}): goodput {goodput.goodput.mean:.1%} "
        f"({goodput.goodput.low:.1%} to {goodput.goodput.high:.1%})."
    )


def sentences(report: SimulationReport) -> list[str]:
    """Return further results as sentences, most important first."""
    lines = [
        *_given_up(report.goodput),
        *_on_islands(report),
        *_on_losses(report),
        *_on_checkpoints(report),
    ]
    if report.dollars is not None:
        low, high = report.dollars
        dollars = f"{in_short(round(low))} to {in_short(round(high))} dollars"
        lines.append(f"It costs {dollars}, spare hosts included.")
    sources = report.failures.sources.items()
    keys = Counter(key.split(".")[1] for key, source in sources if "assumption" in source.text)
    if keys:
        named = (f"{key} of {many(count, 'class', 'es')}" for key, count in keys.items())
        lines.append(f"Assumptions without a source: {', '.join(named)}.")
    return lines


def _number(value: float) -> str:
    """Format a number without an exponent, with three significant digits or all integer digits."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _given_up(goodput: Goodput) -> Iterator[str]:
    """Yield a sentence about the runs that were stopped early, if there are any."""
    if goodput.unfinished:
        yield (
            f"{goodput.unfinished} of {len(goodput.outcomes)} runs were stopped, because they "
            f"would take more than {GIVES_UP:g} times their steps."
        )


def _on_checkpoints(report: SimulationReport) -> Iterator[str]:
    """Yield a sentence about how often the run stops, and about the checkpoint interval."""
    goodput, model = report.goodput, report.model
    apart = f"checkpoints are {model.interval:,.6g} s of steps apart"
    # Young's formula needs the stop rate of the entire run. With islands, use the rate that the
    # trials measured.
    rate = goodput.stop_rate if model.islands > 1 else model.failure_rate
    if rate:
        formulas = [each(rate, model.save) / model.pace for each in (young, daly)]
        yield (
            f"{'All stops' if model.islands > 1 else 'A failure stops the run'} every "
            f"{_number(1 / rate / HOUR)} hours; {apart} (Young's formula gives "
            f"{_number(formulas[0])} s, Daly's {_number(formulas[1])} s)."
        )
    elif model.failure_rate:
        runs = len(goodput.outcomes)
        yield f"In none of the {runs} runs were all islands absent at once; {apart}."


def _on_islands(report: SimulationReport) -> Iterator[str]:
    """Yield sentences about the effect of islands, and about the same run without them."""
    # `shardwise run` supports less than this simulation (see NOT_YET).
    model, whole = report.model, report.whole
    if whole is None or model.islands == 1:
        return
    count = model.topology.hosts * model.units_per_host // model.islands
    island = many(count, "host" if model.units_per_host == 1 else "device")
    held = f", which stops all of them for {model.boundary:.3g} s" if model.boundary else ""
    yield (
        f"{model.islands} islands of {island} synchronise parameters every {model.every} steps"
        f"{held}; a failure stops an island every {_number(1 / model.failure_rate / HOUR)} hours."
        if model.failure_rate
        else f"{model.islands} islands synchronise parameters every {model.every} steps{held}."
    )
    gradients = ", gradients crossing the links at every step" if whole.model.boundary else ""
    yield (
        f"As one run that stops as a whole{gradients}: goodput {whole.goodput.mean:.1%} "
        f"({whole.goodput.low:.1%} to {whole.goodput.high:.1%}), checkpoints "
        f"{whole.model.interval:,.6g} s of steps apart. Islands change the algorithm, "
        "and a step may achieve less: see the guide on slow links."
    )
    for line in _given_up(whole):
        yield f"Without islands: {line}"
    yield NOT_YET


def _on_losses(report: SimulationReport) -> Iterator[str]:
    """Yield sentences about the effect of --reconnect, and about the same run without it."""
    model, whole = report.model, report.whole
    if whole is None or model.reconnect is None:
        return
    survived = sum(f.rate_over(model.topology) for f in model.failures if model.survives(f))
    if survived:
        yield (
            f"The run loses a host every {_number(1 / survived / HOUR)} hours. The others repeat "
            f"the step in progress, and continue {model.reconnect:g} s after they noticed the loss."
        )
    yield (
        f"Without --survive: goodput {whole.goodput.mean:.1%} ({whole.goodput.low:.1%} to "
        f"{whole.goodput.high:.1%}), checkpoints {whole.model.interval:,.6g} s of steps apart."
    )
    for line in _given_up(whole):
        yield f"Without --survive: {line}"
    yield (
        "shardwise run supports --survive on CPUs so far, and on several hosts no host can join a "
        "run: the simulated admissions of spares and repaired hosts are hypothetical."
    )


def as_json(report: SimulationReport) -> dict[str, Any]:
    """Return the results as JSON-serialisable values.

    Times are in seconds, or fractions of the run.
    """
    goodput, model = report.goodput, report.model
    alone = report.whole if model.islands > 1 else None
    stopping = report.whole if model.reconnect is not None else None
    return {
        "on": str(report.cluster),
        "failures": report.failures.title,
        "trials": len(goodput.outcomes),
        "unfinished": goodput.unfinished,
        "seed": report.request.seed,
        "work_seconds": model.work,
        "interval_seconds": model.interval,
        "wall_seconds": vars(goodput.wall),
        "goodput": vars(goodput.goodput),
        "lost": goodput.lost,
        "failures_by_class": goodput.failures,
        "seconds_between_failures": 1 / model.failure_rate if model.failure_rate else None,
        "seconds_between_stops": 1 / goodput.stop_rate if goodput.stop_rate else None,
        "islands": model.islands,
        "equal_every": model.every if model.islands > 1 else None,
        "boundary_seconds": model.boundary,
        "goodput_without_islands": None if alone is None else vars(alone.goodput),
        "unfinished_without_islands": None if alone is None else alone.unfinished,
        "reconnect_seconds": model.reconnect,
        "goodput_without_survive": None if stopping is None else vars(stopping.goodput),
        "intervals_tried": [
            {"interval_seconds": interval, "goodput": vars(band)} for interval, band in report.tried
        ],
        "dollars": report.dollars,
        "sources": {key: str(source) for key, source in sorted(report.failures.sources.items())},
    }
