"""A plot of the loss against bytes and seconds, for several ways to synchronise islands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from shardwise.tools.report.look import GREY, GRID, STYLE, TITLES

COLORS = ("#6b7480", "#2563a8", "#2a8a57", "#d9622b", "#8a4fae", "#b08d1e")

Curves = dict[str, list[dict[str, Any]]]
"""For each way, points with `loss`, `bytes` and `at_rate` (seconds over the link)."""


def draw(curves: Curves, path: Path, megabits: float) -> None:
    """Draw a PNG: held-out loss against bytes on the left, against seconds on the right."""
    with plt.rc_context(STYLE | GRID | TITLES | {"font.size": 10}):
        figure, (left, right) = plt.subplots(
            1, 2, figsize=(9.5, 4.2), sharey=True, layout="constrained"
        )
        draw_side(left, curves, "bytes", 1e-6)
        draw_side(right, curves, "at_rate", 1.0)
        left.set_title("by bytes")
        right.set_title(f"by seconds at {megabits:g} Mbit/s")
        left.set_xlabel("MB that an island has sent")
        right.set_xlabel("seconds: steps on this machine, plus transfers over the link")
        left.set_ylabel("held-out loss (nats per token)")
        handles, labels = left.get_legend_handles_labels()
        figure.legend(
            handles,
            labels,
            loc="outside lower center",
            ncols=2,
            frameon=False,
            labelcolor=GREY,
            title="parameters or gradients made equal",
        )
        figure.savefig(path, dpi=150)
        plt.close(figure)


def draw_side(axes: Axes, curves: Curves, key: str, unit: float) -> None:
    """Draw one curve per way."""
    for color, (way, points) in zip(COLORS, curves.items(), strict=False):
        shown = [point for point in points if point[key] > 0]
        axes.plot(
            [point[key] * unit for point in shown],
            [point["loss"] for point in shown],
            color=color,
            marker="o",
            markersize=3.5,
            linewidth=1.8,
            label=way,
        )
    axes.set_xscale("log")
