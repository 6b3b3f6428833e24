"""Reports a simulation: what was asked, what came of it, in sentences and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from shardwise.outer_optimizer import LOSSLESS
from shardwise.planning.cluster import Cluster
from shardwise.printable import in_short, many
from shardwise.simulation.failure_classes import DAY, HOUR, Failures
from shardwise.simulation.goodput import Band, Goodput
from shardwise.simulation.run_model import RunModel, daly, young


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What the command line asks for; durations in seconds, `save_every` None for the best."""

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
    equal_every: int = 30
    wire: str = LOSSLESS
    late: int = 0
    parameters: float | None = None
    between: float | None = None
    """Mbit/s of the link that joins each island to the others; None: no time is counted for it."""


@dataclass(frozen=True)
class Report:
    """What was simulated, and what came of it. `tried` are intervals in seconds and their goodput,
    where the best one was looked for."""

    asked: Asked
    cluster: Cluster
    failures: Failures
    found: Goodput
    tried: list[tuple[float, Band]]
    whole: Goodput | None = None
    """The same run without its islands."""

    @property
    def model(self) -> RunModel:
        """The run as it was simulated."""
        return self.found.model

    @property
    def dollars(self) -> tuple[float, float] | None:
        """What the run costs with all that is lost, at the lowest and the highest price of its
        devices, spares included; None where the catalogue has no price."""
        prices = [self.cluster.device.number(f"dollars_{end}") for end in ("low", "high")]
        hosts = self.cluster.hosts + self.asked.spares
        hours = self.found.wall.mean / HOUR * hosts * self.cluster.per_host
        low, high = prices
        return None if low is None or high is None else (low * hours, high * hours)


def headline(report: Report) -> str:
    """The finding in one sentence."""
    found, asked = report.found, report.asked
    return (
        f"{asked.days / DAY:.4g} days of steps on {report.cluster} take "
        f"{found.wall.mean / DAY:.4g} days ({found.wall.low / DAY:.4g} to "
        f"{found.wall.high / DAY:.4g}): goodput {found.goodput.mean:.1%} "
        f"({found.goodput.low:.1%} to {found.goodput.high:.1%})."
    )


def sentences(report: Report) -> list[str]:
    """What else there is to say, most important first."""
    found, model = report.found, report.model
    lines = []
    if found.unfinished:
        lines.append(
            f"{found.unfinished} of {len(found.outcomes)} runs were given up: they would take more "
            "than 20 times their steps."
        )
    lines += _on_islands(report)
    if rate := model.stop_rate:
        lines.append(
            f"{'All stops' if model.islands > 1 else 'A failure stops the run'} every "
            f"{1 / rate / HOUR:.3g} hours; checkpoints are "
            f"{model.interval:,.6g} s of steps apart (Young's formula says "
            f"{young(rate, model.save):,.4g} s, Daly's {daly(rate, model.save):,.4g} s)."
        )
    if report.dollars is not None:
        low, high = report.dollars
        dollars = f"{in_short(round(low))} to {in_short(round(high))} dollars"
        lines.append(f"It costs {dollars}, spare hosts included.")
    if assumed := _assumed(report.failures):
        lines.append(f"Assumed, for want of a source: {assumed}.")
    return lines


def _on_islands(report: Report) -> Iterator[str]:
    """What several islands make of it, and what the run would be without them."""
    model, whole = report.model, report.whole
    if whole is None:
        return
    held = f", for which all stand still {model.boundary:.3g} s" if model.boundary else ""
    yield (
        f"{model.islands} islands of {model.topology.hosts // model.islands} hosts are made equal "
        f"every {model.every} steps{held}; a failure stops an island every "
        f"{1 / model.failure_rate / HOUR:.3g} hours."
        if model.failure_rate
        else f"{model.islands} islands are made equal every {model.every} steps{held}."
    )
    gradients = ", gradients crossing the links at every step" if whole.model.boundary else ""
    yield (
        f"As one run that stops as a whole{gradients}: goodput {whole.goodput.mean:.1%} "
        f"({whole.goodput.low:.1%} to {whole.goodput.high:.1%}). Islands are another algorithm, "
        "whose steps may bring less: see the guide on slow links."
    )


def _assumed(failures: Failures) -> str:
    """The keys of the file whose source says that they are an assumption, and of how many
    classes."""
    sources = failures.sources.items()
    keys = Counter(key.split(".")[1] for key, source in sources if "assumption" in source.text)
    return ", ".join(f"{key} of {many(count, 'class', 'es')}" for key, count in keys.items())


def as_json(report: Report) -> dict[str, Any]:
    """Everything, for programs; seconds, and fractions of the wall time."""
    found, model = report.found, report.model
    return {
        "on": str(report.cluster),
        "failures": report.failures.title,
        "trials": len(found.outcomes),
        "unfinished": found.unfinished,
        "seed": report.asked.seed,
        "work_seconds": model.work,
        "interval_seconds": model.interval,
        "wall_seconds": vars(found.wall),
        "goodput": vars(found.goodput),
        "lost": found.lost,
        "failures_by_class": found.failures,
        "seconds_between_failures": 1 / model.failure_rate if model.failure_rate else None,
        "islands": model.islands,
        "equal_every": model.every if model.islands > 1 else None,
        "boundary_seconds": model.boundary,
        "goodput_without_islands": None if report.whole is None else vars(report.whole.goodput),
        "intervals_tried": [
            {"interval_seconds": interval, "goodput": vars(band)} for interval, band in report.tried
        ],
        "dollars": report.dollars,
        "sources": {key: str(source) for key, source in sorted(report.failures.sources.items())},
    }
