"""Runs `shardwise plan`: builds a plan and prints the candidates. Also defines `sw.plan`."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from shardwise.messages.printable import (
    byte_unit,
    in_bytes,
    in_flops,
    in_shell,
    plain_console,
    printable,
    time_unit,
)
from shardwise.tools.plan import search
from shardwise.tools.plan.calibrate import calibrate
from shardwise.tools.plan.memory import KINDS
from shardwise.tools.plan.observe import Script
from shardwise.tools.plan.plans import METHODS, Plan, PlanRequest, make_plan
from shardwise.tools.plan.search import Line
from shardwise.tools.report.output import exit_on_sigterm, is_stdout, write_json

SHOWN = 12
"""Number of candidates to print that fit, and of candidates that do not fit."""

WIDTH = 120
"""Width of the table in columns if the output is not a terminal."""

TENSORS = 15
"""Maximum number of tensor rows that `--explain` prints."""


def plan(
    script: str | Sequence[str],
    *,
    on: str,
    tokens: float | None = None,
    within: float | None = None,
    budget: float | None = None,
    context: int = 0,
    **settings: str,
) -> Plan:
    """Predict the memory, time and cost of a script, like `shardwise plan --on ON SCRIPT`.

    Args:
        script: Path of a script, or a list of the script and its arguments.
        on: Cluster spec, such as "8xH100".
        tokens: Total number of tokens to train on. Needed for the cost.
        within: Maximum duration of the run in days.
        budget: Maximum cost of the run in dollars.
        context: Context-parallel size to try, or 0 to try several if memory is short or devices
            would be idle.
        settings: Flags of `shardwise run`, such as precision="bf16-mixed".

    Returns:
        The plan. Its `lines` are the candidate placements, starting with those that fit.

    Raises:
        LaunchError: If the script cannot be observed. The message names the line of the script.
        ConfigError: If the cluster spec is invalid.

    Example::

        found = plan("train.py", on="8xH100", precision="bf16-mixed")
        print(found.command(found.best))
    """
    words = (script,) if isinstance(script, str) else tuple(script)
    flags = [w for k, v in settings.items() for w in (f"--{k.replace('_', '-')}", str(v))]
    asked = Script(words, tuple(flags))
    # One part is the full sequence.
    context = 0 if context == 1 else context
    return make_plan(PlanRequest(asked, on, tokens, within, budget, context=context))


def show_plan(request: PlanRequest) -> int:
    """Build a plan and print it. Return the exit code, which is 1 if no candidate fits."""
    # With `--json -`, standard output must contain only JSON, so print tables to standard error.
    to_stdout = is_stdout(request.json_file)
    console = plain_console(stderr=to_stdout, width=WIDTH)
    progress = plain_console(stderr=True, width=WIDTH)
    name = printable(request.script.name)
    number = 0
    with exit_on_sigterm(), progress.status(f"observing {name}") as status:

        def show_run(words: str) -> None:
            nonlocal number
            number += 1
            line = f"observing {name}, run {number}: {words}"
            status.update(line)
            if not progress.is_terminal:  # a terminal shows it in the status line
                progress.print(line, soft_wrap=True)

        result = make_plan(request, show_run)
    _print(result, console)
    if request.explain:
        _explain(result, console)
    if request.json_file is not None:
        write_json(json.dumps(result.as_json(), indent=1), request.json_file)
    if request.page is not None:
        from shardwise.tools.plan import page

        console.print(f"page: {page.write(result, request.page)}", soft_wrap=True)
    return 0 if result.best is not None else 1


def show_calibration() -> Path:
    """Measure this machine with a progress bar. Return the path of the catalogue file."""
    return calibrate(plain_console(stderr=True, width=WIDTH))


def _print(result: Plan, console: Console) -> None:
    fitting = shown([line for line in result.lines if line.fits], result.request.context)
    others = [line for line in result.lines if not line.fits][:SHOWN]
    record = result.record
    numel = sum(each.numel for each in record.parameters)
    console.print(
        f"{printable(result.request.script.name)} on {result.cluster}: {numel:,} parameters, "
        f"{record.total_batch or record.batch_size} samples per "
        f"{'step' if record.total_batch else 'worker'}, {in_flops(record.flops)} per forward and "
        f"backward pass of {record.batch_size}",
        soft_wrap=True,
    )
    if fitting:
        console.print(_table(result, fitting))
        # Print commands below the table, because a narrow terminal would wrap them inside it.
        for line in fitting:
            console.print(f"  {in_shell(result.command_words(line))}", soft_wrap=True)
    for line in others:
        flags = " ".join(search.flags_of(line)) or "one device"
        over = in_bytes(line.over or line.over_host) + ("" if line.over else " of host memory")
        console.print(
            f"{flags}: {in_bytes(line.memory.peak)} do not fit, {over} too much at "
            f"{line.memory.where}. Best remedy: {search.remedy(line, result.lines)}",
            soft_wrap=True,
        )
    for note in result.notes():
        console.print(printable(note), soft_wrap=True)


def shown(lines: Sequence[Line], context: int) -> list[Line]:
    """Return the first SHOWN lines, and the first one of each method with `--context context`.

    Without the latter, the user would not see the size that `--context` asks for if other
    placements are faster.
    """
    ways = [(line.choice.context, line.choice.context_method) for line in lines]
    asked = [ways.index((context, each)) for each in METHODS if (context, each) in ways]
    return [line for n, line in enumerate(lines) if n < SHOWN or n in asked]


def _table(result: Plan, lines: Sequence[Line]) -> Table:
    table = Table(title="placements that fit", title_justify="left")
    table.add_column("flags", overflow="fold")
    unit, size = byte_unit(max(line.memory.peak for line in lines))
    longest = max((line.estimate.seconds for line in lines if line.estimate), default=1.0)
    time, scale = time_unit(longest)
    # Three digits of the longest time, and the same number of decimals in every row.
    decimals = max(0, 3 - len(str(int(longest / scale))))
    for heading in (f"{unit}/device", "held by", f"{time}/step"):
        table.add_column(heading, justify="right")
    for heading in ("days", "$ (low-high)", "kWh") if result.request.tokens is not None else ():
        table.add_column(heading, justify="right")
    for line in lines:
        largest = sorted(line.memory.at_peak().items(), key=lambda pair: -pair[1])[:2]
        held = ", ".join(f"{kind} {nbytes / size:.2f}" for kind, nbytes in largest if nbytes)
        estimate = line.estimate
        seconds = "-"
        if estimate is not None:
            seconds = f"{estimate.seconds / scale:,.{decimals}f} ±{estimate.error:.0%}"
        cells = [
            " ".join(search.flags_of(line)) or "(one device)",
            f"{line.memory.peak / size:.2f}",
            held,
            seconds,
        ]
        if result.request.tokens is not None:
            cells += _cost_cells(result, line)
        table.add_row(*cells)
    return table


def _cost_cells(result: Plan, line: Line) -> list[str]:
    """Return the days (marked if they exceed a limit), the range of dollars, and the kWh."""
    cost = result.cost(line)
    if cost is None:
        return ["-"] * 3
    mark = "" if result.is_within(line) else " (too much)"
    return [
        f"{cost.days:.2f}{mark}",
        cost.dollar_range,
        "-" if cost.kwh is None else f"{cost.kwh:,.0f}",
    ]


def _explain(result: Plan, console: Console) -> None:
    """Print the largest tensors at the best candidate's peak, grouped by line of the script."""
    if not result.lines:
        return
    line = result.best or result.lines[0]
    flags = " ".join(search.flags_of(line)) or "one device"
    console.print(f"the peak of {flags}: {in_bytes(line.memory.peak)} at {line.memory.where}")
    for kind in KINDS:
        if nbytes := line.memory.at_peak()[kind]:
            console.print(f"  {kind:<11}{in_bytes(nbytes):>10}")
    for (source, where), (nbytes, count, shape) in grouped(line)[:TENSORS]:
        console.print(
            f"  {in_bytes(nbytes):>10}  {where or 'the batch'}  {count} of {source} "
            f"{'x'.join(map(str, shape))}",
            soft_wrap=True,
        )


def grouped(line: Line) -> list[tuple[tuple[str, str], tuple[int, int, tuple[int, ...]]]]:
    """Group the tensors at the peak by (operator, line), largest group first.

    The value of a group is its number of bytes, its number of tensors, and its largest tensor's
    shape.
    """
    groups: dict[tuple[str, str], list[Any]] = defaultdict(list)
    for held in line.memory.held:
        groups[held.source, held.line].append(held)
    rows = {
        key: (sum(each.nbytes for each in group), len(group), group[0].shape)
        for key, group in groups.items()
    }
    return sorted(rows.items(), key=lambda pair: -pair[1][0])
