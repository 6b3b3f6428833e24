"""Runs `shardwise simulate`: makes the trials, and shows what they found: tables, JSON, page."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from shardwise.errors import ConfigError
from shardwise.planning.catalogue import read_catalogue
from shardwise.planning.cluster import Cluster, parse_cluster
from shardwise.simulation.failure_classes import Failures, Topology, read_failures
from shardwise.simulation.goodput import (
    Band,
    best_interval,
    in_whole_steps,
    intervals_around,
    simulate,
)
from shardwise.simulation.report import Asked, Report, as_json, headline, sentences
from shardwise.simulation.run_model import CAUSES, RunModel

SEARCH_TRIALS = 5
"""Trials of each interval, where the best one is looked for."""

WIDTH = 100
"""Columns of the tables where there is no terminal."""


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
