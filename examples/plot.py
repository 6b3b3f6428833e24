"""The loss curve of a run as a picture: training loss above, held-out perplexity below."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, NullFormatter, ScalarFormatter

from report import Curves

INK, FAINT, BLUE, ORANGE = "#22272e", "#d5dae1", "#2563a8", "#d9622b"

STYLE = {
    "font.size": 10.5,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": FAINT,
    "grid.linewidth": 0.6,
    "xtick.color": INK,
    "ytick.color": INK,
}


def save(curves: Curves, path: Path, *, subtitle: str) -> None:
    """Draw `curves` into a PNG at `path`."""
    with plt.rc_context(STYLE):
        figure, (above, below) = plt.subplots(
            2, 1, figsize=(8, 6.4), sharex=True, height_ratios=(3, 2), layout="constrained"
        )
        draw_losses(above, curves)
        draw_perplexity(below, curves)
        below.xaxis.set_major_locator(MaxNLocator(integer=True))
        below.set_xlabel("step")
        figure.suptitle("A GPT learns to write Python", x=0.02, ha="left", weight="bold", size=14)
        above.set_title(subtitle, loc="left", size=9.5, color="#6b7480", pad=10)
        figure.savefig(path, dpi=150)
        plt.close(figure)


def draw_losses(axes: Axes, curves: Curves) -> None:
    """The loss of each step, faint, and its running mean."""
    steps = [step for step, _ in curves.losses]
    losses = [loss for _, loss in curves.losses]
    axes.plot(steps, losses, color=BLUE, alpha=0.25, linewidth=1.0, label="each step")
    axes.plot(steps, smoothed(losses), color=BLUE, linewidth=2.2, label="running mean")
    axes.set_ylabel("training loss (nats per token)")
    axes.legend(frameon=False, loc="upper right")


def draw_perplexity(axes: Axes, curves: Curves) -> None:
    """The perplexity of each evaluation, with its figure beside the point."""
    steps = [step for step, _ in curves.held_out]
    values = [result.perplexity for _, result in curves.held_out]
    axes.plot(steps, values, color=ORANGE, linewidth=2.2, marker="o", markersize=6)
    axes.set_yscale("log")
    axes.margins(y=0.25)
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_ylabel("held-out perplexity")
    for step, value in zip(steps, values, strict=True):
        axes.annotate(
            f"{value:,.0f}" if value >= 100 else f"{value:.1f}",
            (step, value),
            textcoords="offset points",
            xytext=(0, 9),
            ha="center",
            size=9.5,
            color=ORANGE,
        )


def smoothed(values: list[float], share: float = 0.06) -> list[float]:
    """The mean of each value with those before it, over `share` of the run."""
    reach = max(1, round(share * len(values)))
    means = []
    for end in range(1, len(values) + 1):
        recent = values[max(0, end - reach) : end]
        means.append(sum(recent) / len(recent))
    return means
