"""Draws a measurement's plots (throughput, efficiency, loss, accuracy) and writes its page."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.ticker import MaxNLocator, PercentFormatter

from shardwise.tools.report.look import BLUE, GREY, GRID, SERIES, save_picture
from shardwise.tools.report.page import write_page
from shardwise.tools.scale.records import Curve, Measured
from shardwise.tools.scale.report import BATCH_GROWS, COLUMNS, ScalingReport, accuracy, lines
from shardwise.tools.scale.runs import STRONG

COLORS = (BLUE, *SERIES)
KINDS = {STRONG: COLORS[0], "weak": COLORS[1]}
STYLES = ("-", "--")

STYLE = GRID | {"font.size": 10.5, "savefig.transparent": False}
SIZE = (5.6, 3.7)
MARKED = 40
"""Lines with at most this many points have markers."""

Draw = Callable[[Any, ScalingReport], None]


def draw(report: ScalingReport, folder: Path) -> dict[str, str]:
    """Save every plot that has data to `folder`, and return the SVGs by name."""

    def draw_one(on: Draw, figure: Any) -> None:
        on(figure.subplots(), report)

    return {
        name: save_picture(
            folder / name, SIZE, partial(draw_one, on), style=STYLE, formats=("pdf", "png")
        )
        for name, on in _plots(report)
    }


def _plots(report: ScalingReport) -> Iterator[tuple[str, Draw]]:
    measured = [run.measured for run in report.runs if run.measured]
    # If all runs failed, the page has no plots, only the errors.
    if not measured:
        return
    yield "throughput", _throughput
    yield "efficiency", _efficiency
    if any(each.loss for each in measured):
        yield "loss", _loss
    if any(accuracy(each) for each in measured):
        yield "accuracy", _accuracy


def _throughput(axes: Any, report: ScalingReport) -> None:
    """Plot throughput with confidence intervals, and ideal scaling from the smallest run."""
    for kind in report.plan.kinds:
        rows = report.rows(kind)
        if not rows:
            continue
        workers = [row.run.workers for row in rows]
        rates = [row.measured.rate for row in rows]
        # Start from the smallest measured size, because one worker may not have been measured.
        ideal = [rates[0].value / workers[0] * count for count in workers]
        values = [each.value for each in rates]
        reach = [
            [0 if math.isnan(each.low) else each.value - each.low for each in rates],
            [0 if math.isnan(each.high) else each.high - each.value for each in rates],
        ]
        color = KINDS[kind]
        axes.plot(workers, ideal, color=color, linestyle=":", linewidth=1.3, label=f"{kind}: ideal")
        axes.errorbar(
            workers,
            values,
            yerr=reach,
            color=color,
            linewidth=2.0,
            marker="o",
            capsize=3,
            label=f"{kind}: measured, 95 %",
        )
    axes.set_ylabel("samples per second")
    axes.set_ylim(bottom=0)
    _workers(axes, report)
    axes.legend(frameon=False, fontsize=9, loc="best")


def _efficiency(axes: Any, report: ScalingReport) -> None:
    """Plot the throughput per worker, relative to that of the smallest run."""
    for kind in report.plan.kinds:
        rows = report.rows(kind)
        counts = [row.run.workers for row in rows]
        values = [row.efficiency for row in rows]
        axes.plot(counts, values, color=KINDS[kind], linewidth=2.0, marker="o", label=kind)
    axes.axhline(1.0, color=GREY, linestyle=":", linewidth=1.3)
    axes.set_ylabel("efficiency")
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    _workers(axes, report)
    axes.legend(frameon=False, fontsize=9, loc="lower left")


def _loss(axes: Any, report: ScalingReport) -> None:
    """Plot the loss against epochs, or against steps if no run reached a second epoch."""
    if any(run.measured and len(run.measured.loss) > 1 for run in report.runs):
        _curves(axes, report, lambda measured: measured.loss, "training loss", "epoch")
    else:
        _curves(axes, report, lambda measured: measured.losses, "training loss", "step")


def _accuracy(axes: Any, report: ScalingReport) -> None:
    _curves(axes, report, accuracy, "accuracy", "epoch")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))


def _curves(
    axes: Any, report: ScalingReport, of: Callable[[Measured], Curve], label: str, unit: str
) -> None:
    """Plot one line per number of workers, against `unit` ("epoch" or "step")."""
    # Lines may coincide. Make the first line the widest, and draw each next line thinner and on
    # top, so that all of them are visible.
    sizes = sorted(report.plan.sizes)
    # With many sizes, use a smaller difference, so that the first line is not too wide.
    wider = min(1.6, 6 / len(sizes))
    for style, kind in zip(STYLES, report.plan.kinds, strict=False):
        for row in report.rows(kind):
            if curve := of(row.measured):
                number, counts = sizes.index(row.run.workers), sorted(curve)
                axes.plot(
                    [count + 1 for count in counts],
                    [curve[count] for count in counts],
                    color=COLORS[number % len(COLORS)],
                    linestyle=style,
                    zorder=2 + number,
                    linewidth=1.4 + wider * (len(sizes) - 1 - number),
                    marker="o" if len(curve) <= MARKED else None,
                    markersize=3.5 + wider * (len(sizes) - 1 - number),
                    label=f"{row.run.workers} ({kind})",
                )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    low, high = axes.get_ylim()
    # Differences below 1 % are only rounding differences between sizes. Do not let them fill the
    # axis.
    if high - low < (least := 0.01 * max(abs(low), abs(high))):
        axes.set_ylim((low + high - least) / 2, (low + high + least) / 2)
    axes.ticklabel_format(axis="y", useOffset=False)
    axes.set_xlabel(unit)
    axes.set_ylabel(label)
    axes.legend(frameon=False, fontsize=9, title="workers", title_fontsize=9, handlelength=3)


def _workers(axes: Any, report: ScalingReport) -> None:
    """Set up the workers axis. It is linear so that ideal scaling is a straight line."""
    axes.set_xlim(left=0)
    axes.set_xticks(sorted(report.plan.sizes))
    axes.set_xlabel("workers")


CAPTIONS = {
    "throughput": "Samples per second of all workers. Dotted: the smallest size times N.",
    "efficiency": "Samples per second and worker, relative to the smallest size.",
    "loss": "Mean training loss of each epoch, or of each step if there was only one epoch.",
    "accuracy": "The last {accuracies} of each epoch.",
}


def write_report_page(report: ScalingReport, pictures: Mapping[str, str], file: Path) -> None:
    """Write the HTML page of a measurement. `pictures` maps the names of plots to their SVGs."""
    write_page(
        file,
        "shardwise.tools.scale",
        report=report,
        machine=report.machine(),
        notes=report.notes(),
        columns=list(COLUMNS),
        kinds=[(kind, BATCH_GROWS[kind], lines(report, kind)) for kind in report.plan.kinds],
        failed=[run for run in report.runs if run.error],
        pictures=[
            (name, CAPTIONS[name].format(accuracies=report.accuracies), svg)
            for name, svg in pictures.items()
        ],
    )
