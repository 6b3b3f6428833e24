"""Runs `shardwise simulate`: makes the trials, and shows what they found: tables, JSON, page."""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from shardwise.errors import ConfigError
from shardwise.planning.catalogue import read_catalogue
from shardwise.planning.cluster import Cluster, parse_cluster
from shardwise.printable import in_short, many
from shardwise.simulation.failure_classes import DAY, HOUR, Failures, Topology, read_failures
from shardwise.simulation.goodput import (
    Band,
    Goodput,
    best_interval,
    in_whole_steps,
    intervals_around,
    simulate,
)
from shardwise.simulation.run_model import CAUSES, RunModel, daly, young

SEARCH_TRIALS = 5
"""Trials of each interval, where the best one is looked for."""

WIDTH = 100
"""Columns of the tables where there is no terminal."""


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


@dataclass(frozen=True)
class Report:
    """What was simulated, and what came of it. `tried` are intervals in seconds and their goodput,
    where the best one was looked for."""

    asked: Asked
    cluster: Cluster
    failures: Failures
    found: Goodput
    tried: list[tuple[float, Band]]

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


def run(asked: Asked, out: Path, json_file: Path | None) -> int:
    """Simulate what is `asked`, and show it. Raises ConfigError for what cannot be."""
    cluster = parse_cluster(asked.cluster, read_catalogue(asked.hardware))
    failures = read_failures(asked.failures)
    model = model_of(asked, cluster, failures)
    tried: list[tuple[float, Band]] = []
    with _progress(asked, model) as tick:
        if asked.save_every is None:
            interval, tried = best_interval(model, SEARCH_TRIALS, asked.seed, tick)
            model = replace(model, interval=interval)
        found = simulate(model, asked.trials, asked.seed, tick)
    report = Report(asked, cluster, failures, found, tried)
    if str(json_file) != "-":
        show(report, Console(highlight=False, markup=False) if sys.stdout.isatty() else _plain())
    write(report, out, json_file)
    return 0


def model_of(asked: Asked, cluster: Cluster, failures: Failures) -> RunModel:
    """The run that is `asked` for. Raises ConfigError for more hosts than there are."""
    if asked.least is not None and asked.least > cluster.hosts:
        raise ConfigError(f"--min-hosts {asked.least}: the run has {cluster.hosts} hosts only.")
    topology = Topology(
        cluster.hosts, cluster.per_host, failures.hosts_per_rack, failures.racks_per_pod
    )
    return RunModel(
        topology=topology,
        failures=failures.classes,
        work=asked.days,
        step=asked.step,
        interval=in_whole_steps(min(asked.save_every or asked.days, asked.days), asked.step),
        save=asked.save,
        restart=asked.restart,
        background=asked.background,
        detect=math.inf if asked.detect is None else asked.detect,
        jitter=asked.jitter,
        spares=asked.spares,
        least=asked.least or 0,
    )


@contextmanager
def _progress(asked: Asked, model: RunModel) -> Iterator[Any]:
    """Show how many trials are made; yields what to call after each."""
    searched = len(intervals_around(model)) * SEARCH_TRIALS if asked.save_every is None else 0
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("simulated runs", total=searched + asked.trials)
        yield lambda: bar.advance(task)


def _plain() -> Console:
    """A console for output that is not a terminal."""
    return Console(width=WIDTH, highlight=False, markup=False)


# -- what is shown ------------------------------------------------------------------------------


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
    if rate := model.failure_rate:
        lines.append(
            f"A failure stops the run every {1 / rate / HOUR:.3g} hours; checkpoints are "
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


def _assumed(failures: Failures) -> str:
    """The keys of the file whose source says that they are an assumption, and of how many
    classes."""
    sources = failures.sources.items()
    keys = Counter(key.split(".")[1] for key, source in sources if "assumption" in source.text)
    return ", ".join(f"{key} of {many(count, 'class', 'es')}" for key, count in keys.items())


def show(report: Report, console: Console) -> None:
    """Print the finding, where the time went, and what failed."""
    console.print(headline(report), soft_wrap=True)
    lost = Table("where the time goes", "share")
    lost.columns[1].justify = "right"
    lost.add_row("steps that count", f"{report.found.goodput.mean:.2%}")
    for cause, words in CAUSES.items():
        if report.found.lost[cause]:
            lost.add_row(words, f"{report.found.lost[cause]:.2%}")
    console.print(lost)
    if report.failures.classes:
        failed = Table("what fails", "scope", "times a run")
        failed.columns[2].justify = "right"
        for each in report.failures.classes:
            count = report.found.failures[each.name]
            failed.add_row(each.title, each.scope, f"{count:,.1f}")
        console.print(failed)
    for line in sentences(report):
        console.print(line, soft_wrap=True)


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
        "intervals_tried": [
            {"interval_seconds": interval, "goodput": vars(band)} for interval, band in report.tried
        ],
        "dollars": report.dollars,
        "sources": {key: str(source) for key, source in sorted(report.failures.sources.items())},
    }


def write(report: Report, out: Path, json_file: Path | None) -> None:
    """Write page and plot to `out`, and the JSON where it is asked for."""
    text = json.dumps(as_json(report), indent=1)
    if json_file is not None and str(json_file) == "-":
        click.echo(text)
    elif json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(text + "\n")
    from shardwise.simulation import pictures  # half a second, which nobody waits for before

    out.mkdir(parents=True, exist_ok=True)
    page = pictures.draw(report, out)
    if str(json_file) != "-":
        click.echo(f"page and plot: {page}")
