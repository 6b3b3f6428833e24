"""Runs `shardwise simulate`: runs trials, and shows the results as tables, JSON and a page."""

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
"""Number of trials per interval in the search for the best interval."""


def run(request: SimulationRequest, out: Path, json_file: Path | None) -> int:
    """Simulate the requested run and show the result. Raises ConfigError for an invalid request."""
    cluster = parse_cluster(request.cluster, read_catalogue(request.hardware))
    failures = read_failures(request.failures)
    model = model_of(request, cluster, failures)
    with _progress(request, model) as tick:
        goodput, tried = _found(request, model, tick)
        # For comparison, also simulate a run that every failure stops.
        whole = None
        if model.islands > 1:
            whole, _ = _found(request, as_a_whole(request, model), tick)
        elif model.reconnect is not None:
            whole, _ = _found(request, replace(model, reconnect=None), tick)
    report = SimulationReport(request, cluster, failures, goodput, tried, whole)
    if not is_stdout(json_file):
        show(report, plain_console())
    write(report, out, json_file)
    return 0


def _found(
    request: SimulationRequest, model: RunModel, tick: Callable[[], None]
) -> tuple[Goodput, list[tuple[float, Band]]]:
    """Return the result of the trials, and (interval, goodput) for each interval that was tried.

    If the request does not specify a checkpoint interval, search for the best one first.
    """
    tried: list[tuple[float, Band]] = []
    if request.save_every is None:
        interval, tried = best_interval(model, SEARCH_TRIALS, request.seed, tick)
        model = replace(model, interval=interval)
    return simulate(model, request.trials, request.seed, tick), tried


def model_of(request: SimulationRequest, cluster: Cluster, failures: Failures) -> RunModel:
    """Return the model of the requested run. Raises ConfigError for invalid options."""
    if request.least is not None and request.least > cluster.hosts:
        raise ConfigError(f"--min-hosts {request.least}: the run has only {cluster.hosts} hosts.")
    topology = Topology(
        cluster.hosts, cluster.per_host, failures.hosts_per_rack, failures.racks_per_pod
    )
    islands = cluster.hosts if request.islands == "host" else int(request.islands)
    rule = request.rule
    _refuse_ignored(request, islands)
    if islands > 1:
        _check_islands(request, cluster, islands)
    links = _links(request, islands)
    model = RunModel(
        topology=topology,
        failures=failures.classes,
        work=request.days,
        step=request.step,
        # A placeholder, replaced below. The interval must be a multiple of a round, whose length
        # follows from this model.
        interval=request.days,
        save=request.save,
        restart=request.restart,
        background=request.background,
        detect=math.inf if request.detect is None else request.detect,
        jitter=request.jitter,
        spares=request.spares,
        least=request.least or 0,
        reconnect=request.reconnect,
        islands=islands,
        every=rule.every if islands > 1 else 1,
        boundary=0.0 if links is None else links.boundary_seconds(rule, request.step),
    )
    return replace(model, interval=_interval(request, model))


def _interval(request: SimulationRequest, model: RunModel) -> float:
    """Return the checkpoint interval in seconds of work, rounded to whole rounds.

    By default, it is the length of the run.
    """
    return in_rounds(min(request.save_every or request.days, request.days), model)


def _refuse_ignored(request: SimulationRequest, islands: int) -> None:
    """Raise ConfigError for island or link options that would have no effect."""
    of_links = {"--parameters": request.parameters, "--wire": request.wire, "--late": request.late}
    of_islands = {"--equal-every": request.equal_every, "--between": request.between, **of_links}
    if islands == 1 and (options := [name for name in of_islands if of_islands[name] is not None]):
        raise ConfigError(
            f"{', '.join(options)} without --islands N: without islands it has no effect."
        )
    if request.between is None and (
        options := [name for name in of_links if of_links[name] is not None]
    ):
        raise ConfigError(
            f"{', '.join(options)} without --between MBITS: without it the links take no time."
        )


def _check_islands(request: SimulationRequest, cluster: Cluster, islands: int) -> None:
    """Raise ConfigError if islands cannot have equal sizes, or if other options exclude islands."""
    several = cluster.hosts > 1
    count = cluster.hosts if several else cluster.per_host
    # All islands must have the same size, because each island has the same share of the work.
    if count % islands:
        raise ConfigError(
            f"--islands {islands}: {many(count, 'host' if several else 'device')} cannot be "
            "divided into this many islands of equal size."
        )
    if request.spares and not several:
        raise ConfigError(
            f"--spares {request.spares} with --islands {islands} on one host: a spare host cannot "
            "replace an island, which is part of a host. Leave --spares out."
        )
    if request.reconnect is not None:
        raise ConfigError(
            f"--reconnect {request.reconnect:g} with --islands {islands}: the other islands "
            "continue without an island that has lost a host. Leave one of them out."
        )
    if request.least is not None:
        raise ConfigError(
            f"--min-hosts {request.least} with --islands {islands}: an island that lacks a host "
            "stays absent until it has one, and the others continue. Leave --min-hosts out."
        )


def _links(request: SimulationRequest, islands: int) -> SlowLinks | None:
    """Return the links between islands, or None without --between.

    Raises ConfigError if --between is set but --parameters is not.
    """
    if request.between is None:
        return None
    if request.parameters is None:
        raise ConfigError(
            f"--between {request.between:g} needs --parameters P, the number of parameters that "
            "cross the links, such as 8e9."
        )
    return SlowLinks(islands=islands, parameters=request.parameters, megabits=request.between)


def as_a_whole(request: SimulationRequest, model: RunModel) -> RunModel:
    """Return the model of the same run without islands.

    Every failure then stops the entire run, and gradients cross the same links in every step.
    """
    links = _links(request, model.islands)
    boundary = 0.0 if links is None else links.gradient_seconds
    whole = replace(model, islands=1, every=1, boundary=boundary)
    return replace(whole, interval=_interval(request, whole))


@contextmanager
def _progress(request: SimulationRequest, model: RunModel) -> Iterator[Any]:
    """Show a progress bar of the trials. Yields a function to call after each trial."""
    searched = len(FACTORS) * SEARCH_TRIALS if request.save_every is None else 0
    # With islands or --reconnect, the same run is also simulated without them for comparison.
    models = 1 + (model.islands > 1 or model.reconnect is not None)
    pilot = SEARCH_TRIALS if searched and model.islands > 1 else 0
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("simulated runs", total=models * (searched + request.trials) + pilot)
        yield lambda: bar.advance(task)


def show(report: SimulationReport, console: Console) -> None:
    """Print the main result, a table of how the time was spent, and a table of failures."""
    console.print(headline(report), soft_wrap=True)
    lost = Table("where the time goes", "share")
    lost.columns[1].justify = "right"
    lost.add_row("steps that count", f"{report.goodput.goodput.mean:.2%}")
    for cause, words in CAUSES.items():
        if report.goodput.lost[cause]:
            lost.add_row(words, f"{report.goodput.lost[cause]:.2%}")
    console.print(lost)
    if report.failures.classes:
        failed = Table("failures", "scope", "per run")
        failed.columns[2].justify = "right"
        for each in report.failures.classes:
            count = report.goodput.failures[each.name]
            failed.add_row(each.title, each.scope, f"{count:,.1f}")
        console.print(failed)
    for line in sentences(report):
        console.print(line, soft_wrap=True)


def write(report: SimulationReport, out: Path, json_file: Path | None) -> None:
    """Write the page and the plot to `out`, and the JSON to `json_file` unless it is None."""
    write_json(json.dumps(as_json(report), indent=1), json_file)
    from shardwise.tools.simulate import pictures  # imports matplotlib, which takes half a second

    out.mkdir(parents=True, exist_ok=True)
    page = pictures.draw(report, out)
    if not is_stdout(json_file):
        click.echo(f"page and plot: {page}")
