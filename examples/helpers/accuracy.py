"""Plots of accuracy by epoch, of one run and of several runs with and without warm-up."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, PercentFormatter

from helpers.report import BLUE, GREY, ORANGE, STYLE

COLUMNS = 2


def draw(curves: Mapping[str, list[float]], path: Path, *, workers: int, data: str) -> None:
    """Plot the training and validation accuracy of one run to `path`."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(6.4, 4.2), layout="constrained")
        for name, color in (("training", BLUE), ("validation", ORANGE)):
            values = curves[name]
            axes.plot(range(1, len(values) + 1), values, color=color, linewidth=2.2, label=name)
        _dress(axes, min(min(curves[name]) for name in ("training", "validation")))
        axes.set_title(f"{data}, {_workers(workers)}", loc="left", size=10.5)
        axes.set_xlabel("epoch")
        axes.set_ylabel("accuracy")
        axes.legend(frameon=False, loc="lower right")
        _save(figure, path)


def draw_warmup(found: Mapping[int, Any], path: Path) -> None:
    """Plot validation accuracy with and without warm-up, one panel per number of workers."""
    rows = -(-len(found) // COLUMNS)
    columns = min(COLUMNS, len(found))
    with plt.rc_context(STYLE):
        figure, grid = plt.subplots(
            rows,
            columns,
            figsize=(4.2 * columns, 3.0 * rows),
            sharex=True,
            sharey=True,
            squeeze=False,
            layout="constrained",
        )
        lowest = min(min(c["validation"]) for run in found.values() for c in run["curves"].values())
        for axes, (size, run) in zip(grid.flat, found.items(), strict=False):
            _panel(axes, run["curves"])
            _dress(axes, lowest)
            axes.set_title(f"{_workers(size)}, batch {run['batch']}", loc="left", size=10.5)
        for axes in list(grid.flat)[len(found) :]:
            axes.remove()
        for axes in grid[:, 0]:
            axes.set_ylabel("validation accuracy")
        figure.supxlabel("epoch", size=10.5)
        _save(figure, path)


def _panel(axes: Axes, curves: Mapping[str, Mapping[str, list[float]]]) -> None:
    alone = "none" not in curves
    ways = {"none": (GREY, "no warm-up"), "warm-up": (ORANGE, "warm-up")}
    for way, (color, label) in ways.items():
        if way in curves:
            values = curves[way]["validation"]
            label = "nothing to warm up" if alone else label
            axes.plot(range(1, len(values) + 1), values, color=color, linewidth=2.0, label=label)
    axes.legend(frameon=False, loc="lower right", fontsize=9)


def _dress(axes: Axes, lowest: float) -> None:
    axes.set_ylim(min(lowest, 0.9) - 0.02, 1.005)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _workers(count: int) -> str:
    return f"{count} worker{'s' * (count > 1)}"


def _save(figure: Any, path: Path) -> None:
    """Save a figure as a PDF, and as a PNG next to it."""
    figure.savefig(path)
    figure.savefig(path.with_suffix(".png"), dpi=110)
    plt.close(figure)
