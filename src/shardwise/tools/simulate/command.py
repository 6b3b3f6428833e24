"""Runs `shardwise simulate`: makes the trials, and shows what they found: tables, JSON, page."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from shardwise.errors import ConfigError
from shardwise.messages.printable import many, plain_console
from shardwise.tools.plan.catalogue import read_catalogue
from shardwise.tools.plan.cluster import Cluster, parse_cluster
from shardwise.tools.report.output import is_stdout, write_json
from shardwise.tools.simulate.failure_classes import Failures, Topology, read_failures
from shardwise.tools.simulate.goodput import (
    FACTORS,
    Band,
    Goodput,
    best_interval,
    in_rounds,
    simulate,
)
from shardwise.tools.simulate.report import (
    SimulationReport,
    SimulationRequest,
    as_json,
    headline,
    sentences,
)
from shardwise.tools.simulate.run_model import CAUSES, RunModel
from shardwise.tools.simulate.slow_links import SlowLinks

SEARCH_TRIALS = 5
"""Trials of each interval, where the best one is looked for."""


def run(asked: SimulationRequest, out: Path, json_file: Path | None) -> int:
    """Simulate what is `asked`, and show it. Raises ConfigError for what cannot be."""
    cluster = parse_cluster(asked.cluster, read_catalogue(asked.hardware))
    failures = read_failures(asked.failures)
    model = model_of(asked, cluster, failures)
    with _progress(asked, model) as tick:
        found, tried = _found(asked, model, tick)
        whole = None
        if model.islands > 1:
            whole, _ = _found(asked, as_a_whole(asked, model), tick)
    report = SimulationReport(asked, cluster, failures, found, tried, whole)
    if not is_stdout(json_file):
        show(report, plain_console())
    write(report, out, json_file)
    return 0


def _found(
    asked: SimulationRequest, model: RunModel, tick: Callable[[], None]
) -> tuple[Goodput, list[tuple[float, Band]]]:
    """What the trials of `model` find, and the intervals that were tried, where the best one is
    `asked` for."""
    tried: list[tuple[float, Band]] = []
    if asked.save_every is None:
        interval, tried = best_interval(model, SEARCH_TRIALS, asked.seed, tick)
        model = replace(model, interval=interval)
    return simulate(model, asked.trials, asked.seed, tick), tried


def model_of(asked: SimulationRequest, cluster: Cluster, failures: Failures) -> RunModel:
    """The run that is `asked` for. Raises ConfigError for more hosts than there are."""
    if asked.least is not None and asked.least > cluster.hosts:
        raise ConfigError(f"--min-hosts {asked.least}: the run has {cluster.hosts} hosts only.")
    topology = Topology(
        cluster.hosts, cluster.per_host, failures.hosts_per_rack, failures.racks_per_pod
    )
    islands = cluster.hosts if asked.islands == "host" else int(asked.islands)
    rule = asked.rule
    _refuse_ignored(asked, islands)
    if islands > 1:
        _check_islands(asked, cluster, islands)
    links = _links(asked, islands)
    model = RunModel(
        topology=topology,
        failures=failures.classes,
        work=asked.days,
        step=asked.step,
        interval=asked.days,
        save=asked.save,
        restart=asked.restart,
        background=asked.background,
        detect=math.inf if asked.detect is None else asked.detect,
        jitter=asked.jitter,
        spares=asked.spares,
        least=asked.least or 0,
        islands=islands,
        every=rule.every if islands > 1 else 1,
        boundary=0.0 if links is None else links.boundary_seconds(rule, asked.step),
    )
    return replace(model, interval=_interval(asked, model))


def _interval(asked: SimulationRequest, model: RunModel) -> float:
    """The interval that is `asked` for in whole rounds, seconds of work; all of it for the best."""
    return in_rounds(min(asked.save_every or asked.days, asked.days), model)


def _refuse_ignored(asked: SimulationRequest, islands: int) -> None:
    """Raise ConfigError for an option of islands, or of the links between them, without those."""
    of_links = {"--parameters": asked.parameters, "--wire": asked.wire, "--late": asked.late}
    of_islands = {"--equal-every": asked.equal_every, "--between": asked.between, **of_links}
    if islands == 1 and (given := [name for name in of_islands if of_islands[name] is not None]):
        raise ConfigError(
            f"{', '.join(given)} without --islands N: there is nothing to make equal."
        )
    if asked.between is None and (
        given := [name for name in of_links if of_links[name] is not None]
    ):
        raise ConfigError(
            f"{', '.join(given)} without --between MBITS: no time is counted for the links then."
        )


def _check_islands(asked: SimulationRequest, cluster: Cluster, islands: int) -> None:
    """Raise ConfigError where the hosts, or the devices of the only one, cannot be so many
    islands."""
    several = cluster.hosts > 1
    count = cluster.hosts if several else cluster.per_host
    if count % islands:
        raise ConfigError(
            f"--islands {islands}: {many(count, 'host' if several else 'device')} cannot be cut "
            "into so many of equal size."
        )
    if asked.spares and not several:
        raise ConfigError(
            f"--spares {asked.spares} with --islands {islands} on one host: another host takes no "
            "island of it. Leave --spares out."
        )
    if asked.least is not None:
        raise ConfigError(
            f"--min-hosts {asked.least} with --islands {islands}: an island that lacks a host "
            "stays away until it has one, and the others go on. Leave --min-hosts out."
        )


def _links(asked: SimulationRequest, islands: int) -> SlowLinks | None:
    """The links between islands; None where no time is counted for them. Raises ConfigError."""
    if asked.between is None:
        return None
    if asked.parameters is None:
        raise ConfigError(
            f"--between {asked.between:g} needs --parameters P, such as 8e9: how much it carries."
        )
    return SlowLinks(islands=islands, parameters=asked.parameters, megabits=asked.between)


def as_a_whole(asked: SimulationRequest, model: RunModel) -> RunModel:
    """The same run without its islands: each failure stops all of it, and gradients cross the same
    links at every step."""
    links = _links(asked, model.islands)
    boundary = 0.0 if links is None else links.gradient_seconds
    made = replace(model, islands=1, every=1, boundary=boundary)
    return replace(made, interval=_interval(asked, made))


@contextmanager
def _progress(asked: SimulationRequest, model: RunModel) -> Iterator[Any]:
    """Show how many trials are made; yields what to call after each."""
    searched = len(FACTORS) * SEARCH_TRIALS if asked.save_every is None else 0
    models = 1 + (model.islands > 1)
    pilot = SEARCH_TRIALS if searched and model.islands > 1 else 0
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("simulated runs", total=models * (searched + asked.trials) + pilot)
        yield lambda: bar.advance(task)


def show(report: SimulationReport, console: Console) -> None:
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


def write(report: SimulationReport, out: Path, json_file: Path | None) -> None:
    """Write page and plot to `out`, and the JSON where it is asked for."""
    write_json(json.dumps(as_json(report), indent=1), json_file)
    from shardwise.tools.simulate import pictures  # half a second, which nobody waits for before

    out.mkdir(parents=True, exist_ok=True)
    page = pictures.draw(report, out)
    if not is_stdout(json_file):
        click.echo(f"page and plot: {page}")
