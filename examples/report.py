"""The end of a run: a picture of its curves and a table of its figures."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, NullFormatter, ScalarFormatter
from rich.table import Table

from log import Curves

INK, GREY, FAINT, BLUE, ORANGE = "#22272e", "#6b7480", "#d5dae1", "#2563a8", "#d9622b"

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


def draw(curves: Curves, path: Path, *, subtitle: str) -> None:
    """A PNG at `path`: training loss above, held-out perplexity below."""
    with plt.rc_context(STYLE):
        figure, (above, below) = plt.subplots(
            2, 1, figsize=(8, 6.4), sharex=True, height_ratios=(3, 2), layout="constrained"
        )
        draw_losses(above, curves)
        draw_perplexity(below, curves)
        below.xaxis.set_major_locator(MaxNLocator(integer=True))
        below.set_xlabel("step")
        above.set_title(subtitle, loc="left", size=9.5, color=GREY, pad=12)
        figure.savefig(path, dpi=150)
        plt.close(figure)


def draw_losses(axes: Axes, curves: Curves) -> None:
    """The loss of each step, faint, and its running mean."""
    steps = [step for step, _ in curves.losses]
    losses = [loss for _, loss in curves.losses]
    axes.plot(steps, losses, color=BLUE, alpha=0.3, linewidth=1.0, label="each step")
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


def table(rows: dict[str, str]) -> Table:
    """The closing table: what was measured, by name."""
    closing = Table(show_header=False)
    closing.add_column(style="bold", no_wrap=True)
    closing.add_column(overflow="fold")
    for name, value in rows.items():
        closing.add_row(name, value)
    return closing


def resident_line(resident: list[int]) -> str:
    """The resident set of each rank; of the smallest and the largest where ranks are many."""
    if len(resident) > 4:
        low, high = min(resident) / 1e6, max(resident) / 1e6
        return f"{low:,.0f} to {high:,.0f} MB on {len(resident)} ranks"
    return " · ".join(f"rank {rank}: {size / 1e6:,.0f} MB" for rank, size in enumerate(resident))


def files_lines(folder: Path) -> str:
    """The files in `folder`, a line each, with their sizes."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return "\n".join(f"{path} ({size_text(path.stat().st_size)})" for path in paths)


def size_text(size: int) -> str:
    """A number of bytes for people."""
    return f"{size / 1e6:.1f} MB" if size > 1e6 else f"{size / 1e3:.1f} kB"
