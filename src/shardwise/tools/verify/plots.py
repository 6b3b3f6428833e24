"""Draws the plots of a verification: losses, largest difference per step, and worst tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.ticker import MaxNLocator

from shardwise.tools.report.look import (
    BLUE,
    FAINT,
    GREEN,
    GREY,
    GRID,
    OCHRE,
    RED,
    SERIES,
    TITLES,
    save_picture,
)
from shardwise.tools.verify.comparing import Comparison, largest_by_step
from shardwise.tools.verify.report import largest
from shardwise.tools.verify.verdicts import TOLERANCE, TrainingVerdict, format_difference

COLORS = SERIES
VERDICTS = {
    TrainingVerdict.BITS: GREEN,
    TrainingVerdict.ROUNDING: GREEN,
    TrainingVerdict.UNPROVED: OCHRE,
    TrainingVerdict.DIFFERS: RED,
}
STYLE = GRID | TITLES | {"axes.axisbelow": True}
LEAST = 1e-17
"""Position of identical values on the log scale, which has no zero."""
TENSORS = 10
REQUIRED = f"required in fp64: {format_difference(TOLERANCE)}"
SMALL = {"color": GREY, "fontsize": 8.5, "ha": "center", "va": "bottom"}


@dataclass(frozen=True, kw_only=True)
class DrawnResult:
    """The curves of one result.

    Attributes:
        label: Name of the result in the legends.
        losses: Losses of the reference and of the run, by step.
        own: Comparison in the script's own precision.
        wide: Comparison in fp64, or None without fp64 runs.
    """

    label: str
    verdict: TrainingVerdict
    losses: tuple[Sequence[float], Sequence[float]]
    own: Comparison
    wide: Comparison | None

    @property
    def judged(self) -> Comparison:
        """The comparison that determines the verdict."""
        return self.own if self.wide is None else self.wide


def draw(command: str, results: Sequence[DrawnResult], folder: Path) -> str:
    """Save verify.png to `folder`, titled with the verdict. Return the SVG without the title."""

    def draw_all(figure: Any) -> None:
        losses, steps, tensors = figure.subplots(1, 3, width_ratios=(1, 1, 1.1))
        _losses(losses, results)
        _steps(steps, results)
        _tensors(tensors, results)

    worst = max((result.verdict for result in results), key=lambda each: each.value)
    title = {
        "t": f"{_short(command, 80)}: {worst.words}",
        "color": VERDICTS[worst],
        "fontsize": 13,
        "fontweight": "bold",
    }
    return save_picture(folder / "verify", (14, 4.8), draw_all, style=STYLE, title=title)


def _losses(axes: Any, results: Sequence[DrawnResult]) -> None:
    """Plot the reference's losses as a wide pale line, and the other runs' losses as thin lines."""
    axes.set_title("loss")
    reference = max((result.losses[0] for result in results), key=len)
    axes.plot(
        range(len(reference)),
        reference,
        color=BLUE,
        linewidth=5,
        alpha=0.35,
        label="reference",
    )
    for number, result in enumerate(results):
        axes.plot(
            range(len(result.losses[1])),
            result.losses[1],
            color=COLORS[number % len(COLORS)],
            linewidth=1.4,
            marker=".",
            label=_short(result.label),
        )
    axes.ticklabel_format(axis="y", useOffset=False)
    _by_step(axes)
    _legend_below(axes)


def _steps(axes: Any, results: Sequence[DrawnResult]) -> None:
    """Plot the largest difference per step, in the script's own precision and in fp64."""
    axes.set_title("largest relative difference")
    axes.set_yscale("log")
    for number, result in enumerate(results):
        color = COLORS[number % len(COLORS)]
        curves = [("as it is", result.own, "-"), ("fp64", result.wide, "--")]
        for words, comparison, line in curves:
            if comparison is None:
                continue
            points = largest_by_step(comparison)
            axes.plot(
                [step - 1 for step, _ in points],
                # Draw infinite differences (a missing tensor, NaN) at 1e3.
                [min(max(value, LEAST), 1e3) for _, value in points],
                color=color,
                linestyle=line,
                linewidth=1.6,
                label=f"{_short(result.label, 22)}, {words}",
            )
    axes.axhline(TOLERANCE, color=GREY, linestyle=":", linewidth=1.2, label=REQUIRED)
    axes.axhspan(LEAST / 3, LEAST * 3, color=FAINT, alpha=0.5, linewidth=0)
    axes.text(0.5, LEAST * 4, "equal bits", transform=axes.get_yaxis_transform(), **SMALL)
    axes.set_ylim(LEAST / 3, None)
    _by_step(axes)
    axes.set_xlabel("step (-1: before the first)")
    _legend_below(axes)


def _tensors(axes: Any, results: Sequence[DrawnResult]) -> None:
    """Plot the largest differences by tensor, for the placement with the worst verdict."""
    result = max(results, key=lambda each: each.verdict.value)
    # Reverse the rows to put the largest difference on top, because barh starts at the bottom.
    rows = largest(result.judged, TENSORS)[::-1]
    axes.set_title(f"tensors by difference{' in fp64' if result.wide is not None else ''}")
    if not rows:
        axes.axis("off")
        words = "no bit differs" if result.judged.steps else "nothing was compared"
        axes.text(0.5, 0.5, words, ha="center", va="center", color=GREY)
        return
    axes.set_xscale("log")
    axes.barh(
        [_tail(each.name) for _, each in rows],
        [min(max(each.relative, LEAST), 1e3) for _, each in rows],
        color=COLORS[list(results).index(result) % len(COLORS)],
        height=0.6,
    )
    axes.axvline(TOLERANCE, color=GREY, linestyle=":", linewidth=1.2)
    axes.set_xlim(LEAST, None)
    axes.set_ylim(len(rows) - TENSORS - 0.5, len(rows) - 0.5)  # same bar height for any number
    axes.set_xlabel(f"relative (dotted: {REQUIRED})")
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", labelsize=8.5)


def _legend_below(axes: Any) -> None:
    """Put the legend below the plot, where it cannot cover a curve."""
    axes.legend(frameon=False, fontsize=8.5, loc="upper left", bbox_to_anchor=(0, -0.16), ncols=2)


def _by_step(axes: Any) -> None:
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def _short(text: str, most: int = 40) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _tail(name: str, most: int = 34) -> str:
    """Shorten a long name by cutting off its start, because its end is more informative."""
    return name if len(name) <= most else f"…{name[-most + 1 :]}"
