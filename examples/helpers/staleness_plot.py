"""A plot of the loss and of the waiting time for several values of --behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from shardwise.tools.report.look import GREY, GRID, STYLE, TITLES

COLORS = ("#6b7480", "#2563a8", "#d9622b", "#2a8a57")
"""Colors of the curves."""

COMPUTING, WAITING = "#b9c0ca", "#7d4e9e"
"""Colors of the bars, which differ from those of the curves."""

Found = dict[int, dict[str, Any]]
"""For each value of --behind: the `curve` (points with `step` and `loss`), the number of `steps`,
and the total seconds `computing` and `waiting`."""


def draw(found: Found, path: Path, batch_size: int) -> None:
    """Draw a PNG: held-out loss by samples on the left, the time of a step on the right."""
    with plt.rc_context(STYLE | GRID | TITLES | {"font.size": 10}):
        figure, (left, right) = plt.subplots(
            1, 2, figsize=(9.5, 3.8), width_ratios=(3, 2), layout="constrained"
        )
        _losses(left, found, batch_size)
        _times(right, found)
        figure.savefig(path, dpi=150)
        plt.close(figure)


def _losses(axes: Axes, found: Found, batch_size: int) -> None:
    """Draw one curve per value of --behind."""
    for color, (behind, result) in zip(COLORS, found.items(), strict=False):
        points = result["curve"]
        axes.plot(
            [point["step"] * batch_size for point in points],
            [point["loss"] for point in points],
            color=color,
            marker="o",
            markersize=3.5,
            linewidth=1.8,
            label=f"{behind} behind",
        )
    axes.set_title("loss by samples")
    axes.set_xlabel("samples, of all workers")
    axes.set_ylabel("held-out loss (nats per token)")
    axes.legend(frameon=False, labelcolor=GREY)


def _times(axes: Axes, found: Found) -> None:
    """Draw the milliseconds of a step as one bar per value of --behind."""
    names = [f"{behind} behind" for behind in found]
    computing, waiting = (
        [1e3 * result[key] / result["steps"] for result in found.values()]
        for key in ("computing", "waiting")
    )
    bars = {"height": 0.6, "zorder": 2}
    axes.barh(names, computing, color=COMPUTING, label="computing, slow steps included", **bars)
    axes.barh(names, waiting, left=computing, color=WAITING, label="waiting for the other", **bars)
    axes.set_ylim(len(names) + 0.3, -0.6)  # the first on top, and room for the legend below
    axes.grid(visible=False, axis="y")
    axes.set_title("a step of a worker")
    axes.set_xlabel("ms, mean over steps and workers")
    axes.set_xlim(0, 1.05 * max(map(sum, zip(computing, waiting, strict=True))))
    axes.legend(loc="lower left", frameon=False, labelcolor=GREY)
