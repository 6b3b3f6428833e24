"""Reports a measurement as a table, JSON and CSV."""

from __future__ import annotations

import csv
import json
import math
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import chain, compress
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from shardwise.launch.resources import usable_cores
from shardwise.messages.printable import many
from shardwise.tools.report.output import finite, machine_facts
from shardwise.tools.scale.records import Curve, Measured
from shardwise.tools.scale.runs import WEAK, MeasuredRun, ScalingPlan


@dataclass(frozen=True, kw_only=True)
class ScalingRow:
    """The result for one number of workers.

    `speedup` and `efficiency` are relative to the throughput per worker of the smallest successful
    run.
    """

    run: MeasuredRun
    measured: Measured
    speedup: float
    efficiency: float


@dataclass(frozen=True, kw_only=True)
class ScalingReport:
    """All runs of a measurement."""

    plan: ScalingPlan
    runs: Sequence[MeasuredRun]

    @property
    def command(self) -> str:
        """The script and its arguments, as the user wrote them."""
        return " ".join(self.plan.words)

    def rows(self, kind: str) -> list[ScalingRow]:
        """Return the successful runs of kind `kind`, sorted by number of workers."""
        measured_runs = [
            (run, run.measured) for run in self.runs if run.kind == kind and run.measured
        ]
        if not measured_runs:
            return []
        # The throughput per worker of the smallest successful run, which may have several workers.
        base = measured_runs[0][1].rate.value / measured_runs[0][0].workers
        return [
            ScalingRow(
                run=run,
                measured=measured,
                speedup=measured.rate.value / base,
                efficiency=measured.rate.value / base / run.workers,
            )
            for run, measured in measured_runs
        ]

    @property
    def accuracies(self) -> str:
        """The names of the means shown as accuracy, joined by " or "."""
        results = [run.measured for run in self.runs if run.measured]
        return " or ".join(sorted({name for each in results if (name := accuracy_name(each))}))

    def machine(self) -> dict[str, str]:
        threads = os.environ.get("OMP_NUM_THREADS", str(self.plan.threads))
        facts = machine_facts()
        return {
            "machine": f"{facts.pop('machine')}, {_processor()}",
            "cores": str(usable_cores()),
            "threads per worker": threads,
            **facts,
        }

    def notes(self) -> list[str]:
        """Return notes on how to read the figures."""
        # Count the cores that this process may use, because a job may limit them.
        cores, most = usable_cores(), max(self.plan.sizes)
        lines = [
            "engine.resume, save and export do nothing during the runs (--trial): every size "
            "starts with the model as the script makes it.",
            f"The first {self.plan.warmup} steps of each run are dropped. The rate is the samples "
            "of all workers divided by the time of the steps. A step begins when the last worker "
            "asks for its data, so evaluations and saves between steps are not counted. ± is half "
            "of the 95 % interval.",
        ]
        if any(run.measured and run.measured.loss for run in self.runs):
            lines.append(
                "loss is the mean training loss of the last epoch, which may be incomplete. It "
                "includes dropped steps."
            )
        if self.accuracies:
            lines.append(
                f"accuracy is the last {self.accuracies} that the script's sw.Metrics computed."
            )
        if any(run.measured and not run.measured.loss for run in self.runs):
            lines.append(
                "Scripts without a loss train with shardwise.horovod. Batches of torch's "
                "DataLoaders are counted for them: an evaluation outside of torch.no_grad() counts "
                "as training, with its samples and its time."
            )
        if most > cores:
            lines.append(
                f"This machine has {many(cores, 'core')}, so more than {many(cores, 'worker')} "
                "share them, and their efficiency on CPUs is bound to fall."
            )
        return lines


def table(report: ScalingReport) -> Table:
    """Return the results as a table for the terminal, without empty columns."""
    rows = {kind: lines(report, kind) for kind in report.plan.kinds}
    filled = [any(column) for column in zip(*chain(*rows.values()), strict=True)]
    grid = Table(
        title=report.command,
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
    )
    for name, justify in compress(COLUMNS.items(), filled):
        grid.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for several in rows.values():
        for cells in several:
            grid.add_row(*compress(cells, filled))
        grid.add_section()
    return grid


COLUMNS = {
    "": "left",
    "workers": "right",
    "batch": "right",
    "samples/s": "right",
    "±": "right",
    "speed-up": "right",
    "efficiency": "right",
    "loss": "right",
    "accuracy": "right",
}


def lines(report: ScalingReport, kind: str) -> list[list[str]]:
    """Return the table cells of all runs of kind `kind`, including failed ones."""
    rows = {row.run.workers: row for row in report.rows(kind)}
    return [
        _cells(kind, rows[run.workers])
        if run.workers in rows
        else [kind, str(run.workers), "", "failed", *[""] * (len(COLUMNS) - 4)]
        for run in report.runs
        if run.kind == kind
    ]


def _cells(kind: str, row: ScalingRow) -> list[str]:
    rate = row.measured.rate
    half = (rate.high - rate.low) / 2
    return [
        kind,
        str(row.run.workers),
        f"{row.measured.batch:,}",
        figure(rate.value),
        "" if math.isnan(half) else figure(half),
        f"{row.speedup:.2f}",
        f"{row.efficiency:.0%}",
        _last(row.measured.loss, "{:.4g}"),
        _last(accuracy(row.measured), "{:.2%}"),
    ]


def figure(value: float) -> str:
    """Format a rate with about three significant digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def accuracy_name(measured: Measured) -> str:
    """Return the name of the mean to show as accuracy, or "" if there is none.

    Evaluation means take precedence over training means.
    """
    named = [name for name in measured.means if "acc" in name.split(" ", 1)[1].lower()]
    return min(named, default="")  # "evaluation ..." before "training ..."


def accuracy(measured: Measured) -> Curve:
    """Return the curve of the mean to show as accuracy, or an empty curve if there is none."""
    name = accuracy_name(measured)
    return dict(measured.means[name]) if name else {}


def _last(curve: Curve, form: str) -> str:
    return form.format(curve[max(curve)]) if curve else ""


def write(report: ScalingReport, folder: Path) -> None:
    """Write scaling.json and scaling.csv to `folder`."""
    (folder / "scaling.json").write_text(json.dumps(as_json(report), indent=2) + "\n")
    with (folder / "scaling.csv").open(
        "w", newline="", encoding="utf-8", errors="backslashreplace"
    ) as file:
        writer = csv.DictWriter(file, fieldnames=list(_FLAT))
        writer.writeheader()
        writer.writerows(
            {name: each[name] for name in _FLAT} for each in as_json(report)["results"]
        )


_FLAT = (
    "kind",
    "workers",
    "batch",
    "steps",
    "dropped",
    "step_seconds",
    "samples_per_second",
    "low",
    "high",
    "speedup",
    "efficiency",
    "final_loss",
    "final_accuracy",
    "wall_seconds",
    "error",
)


def as_json(report: ScalingReport) -> dict[str, Any]:
    """Return all results as JSON-serialisable values. Unknown values are None."""
    return {
        "command": report.command,
        "flags": list(report.plan.flags),
        "warmup": report.plan.warmup,
        **report.machine(),
        "results": [_result(report, run) for run in report.runs],
    }


def _result(report: ScalingReport, run: MeasuredRun) -> dict[str, Any]:
    values: dict[str, Any] = dict.fromkeys(_FLAT)
    values |= {"kind": run.kind, "workers": run.workers, "wall_seconds": run.wall}
    if run.measured is None:
        return values | {"error": run.error}
    (row,) = (each for each in report.rows(run.kind) if each.run is run)
    measured, curve = run.measured, accuracy(run.measured)
    rate = {name: finite(value) for name, value in asdict(measured.rate).items()}
    return values | {
        "batch": measured.batch,
        "steps": measured.steps,
        "dropped": measured.dropped,
        "step_seconds": measured.seconds,
        "samples_per_second": rate["value"],
        "low": rate["low"],
        "high": rate["high"],
        "speedup": row.speedup,
        "efficiency": row.efficiency,
        "final_loss": measured.loss[max(measured.loss)] if measured.loss else None,
        "final_accuracy": curve[max(curve)] if curve else None,
        "loss_by_epoch": measured.loss,
        "means_by_epoch": dict(measured.means),
    }


def _processor() -> str:
    """Return the CPU model's name."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        return platform.processor() or platform.machine()
    return platform.processor() or platform.machine()


BATCH_GROWS = {WEAK: "the same batch per worker", "strong": "the same total batch"}
"""For each kind of scaling, the quantity that is the same for all numbers of workers."""
