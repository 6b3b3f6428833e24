"""The report at the end of a run: a plot of its curves and a table of its figures."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter
from rich.table import Table

from helpers.log import Curves

INK, GREY, FAINT, BLUE, ORANGE = "#22272e", "#6b7480", "#d5dae1", "#2563a8", "#d9622b"

MOST_FIGURES = 8
"""Maximum number of points of a curve that are labelled with their value."""

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
    """Draw a PNG: training loss above, held-out perplexity below."""
    with plt.rc_context(STYLE):
        figure, (above, below) = plt.subplots(
            2, 1, figsize=(8, 6.4), sharex=True, height_ratios=(3, 2), layout="constrained"
        )
        figure.get_layout_engine().set(w_pad=0.15, h_pad=0.12)
        draw_losses(above, curves)
        draw_perplexity(below, curves)
        below.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
        below.set_xlabel("step")
        figure.align_ylabels()
        above.set_title(subtitle, loc="left", size=9.5, color=GREY, pad=12)
        figure.savefig(path, dpi=150)
        plt.close(figure)


def draw_losses(axes: Axes, curves: Curves) -> None:
    """Draw the loss of each step in a faint color, and its running mean."""
    steps = [step for step, _ in curves.losses]
    losses = [loss for _, loss in curves.losses]
    axes.plot(steps, losses, color=BLUE, alpha=0.3, linewidth=1.0, label="each step")
    axes.plot(steps, smoothed(losses), color=BLUE, linewidth=2.2, label="running mean")
    axes.set_ylabel("training loss (nats per token)")
    axes.legend(frameon=False, loc="upper right")


def draw_perplexity(axes: Axes, curves: Curves) -> None:
    """Draw the perplexity of each evaluation, with its value next to the point."""
    steps = [step for step, _ in curves.held_out]
    values = [result.perplexity for _, result in curves.held_out]
    axes.plot(steps, values, color=ORANGE, linewidth=2.2, marker="o", markersize=6)
    axes.set_yscale("log")
    axes.margins(x=0.07, y=0.25)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_ylabel("held-out perplexity")
    every = -(-len(values) // MOST_FIGURES)
    last = len(values) - 1
    for index, (step, value) in enumerate(zip(steps, values, strict=True)):
        if index % every and index != last:
            continue
        axes.annotate(
            f"{value:,.0f}" if value >= 100 else f"{value:.1f}",
            (step, value),
            textcoords="offset points",
            xytext=(5, 6),
            size=9.5,
            color=ORANGE,
        )


def smoothed(values: list[float], share: float = 0.03) -> list[float]:
    """Return the mean of each value and its neighbours, a fraction `share` of all on each side.

    At the beginning fewer neighbours are used, the same number on each side: the curve falls fast
    there, and the mean must not lag.
    """
    reach = max(1, round(share * len(values)))
    means = []
    for middle in range(len(values)):
        side = min(reach, middle)
        around = values[middle - side : middle + side + 1]
        means.append(sum(around) / len(around))
    return means


def table(rows: dict[str, str]) -> Table:
    """Return the closing table of names and values."""
    closing = Table(show_header=False)
    closing.add_column(style="bold", no_wrap=True)
    closing.add_column(overflow="fold")
    for name, value in rows.items():
        closing.add_row(name, value)
    return closing


def resident_line(resident: list[int]) -> str:
    """Return the resident set of each rank, or with many ranks the smallest and the largest."""
    if len(resident) > 4:
        low, high = min(resident) / 1e6, max(resident) / 1e6
        return f"{low:,.0f} to {high:,.0f} MB on {len(resident)} ranks"
    return " · ".join(f"rank {rank}: {size / 1e6:,.0f} MB" for rank, size in enumerate(resident))


def files_lines(folder: Path) -> str:
    """Return a line for `folder` and for each file or folder in it, with sizes."""
    lines = [f"{folder}/"]
    for path in sorted(folder.iterdir()):
        inside = path.rglob("*") if path.is_dir() else [path]
        size = sum(file.stat().st_size for file in inside if file.is_file())
        lines.append(f"  {path.name}{'/' * path.is_dir()} ({size_text(size)})")
    return "\n".join(lines)


def size_text(size: int) -> str:
    """Return a number of bytes with its unit."""
    return f"{size / 1e6:.1f} MB" if size > 1e6 else f"{size / 1e3:.1f} kB"
