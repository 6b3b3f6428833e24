"""Draws the time of a step by kind and rank, and the cost of placements against their days."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.planning.choice import Estimate
from shardwise.planning.cost import Cost, frontier
from shardwise.planning.stages import KINDS

COLORS = (
    "#2563a8", "#3a9aa8", "#7a6a5c", "#8a4fb0", "#d9622b", "#c23b6b",
    "#b0892c", "#d5dae1", "#2f8f5b", "#e0a458", "#6b7480",
)  # fmt: skip
"""A color for each kind, in the order of KINDS."""

MOST_RANKS = 16
"""Stages of a pipeline that are drawn; of more, evenly spaced ones."""


@dataclass(frozen=True)
class TimedPlacement:
    """A placement as it is drawn: its flags, its step, and what a training of it costs."""

    label: str
    estimate: Estimate
    cost: Cost | None = None


def draw_times(placements: Sequence[TimedPlacement], path: Path) -> None:
    """A bar for each placement, or each pipeline stage of it: seconds of a step by kind, stacked,
    with the error band. Writes a PNG to `path`."""
    bars = [(name, parts, each) for each in placements for name, parts in _bars(each)]
    figure, axis = _figure(len(bars))
    left = [0.0] * len(bars)
    for kind, color in zip(KINDS, COLORS, strict=True):
        widths = [parts.get(kind, 0.0) for _, parts, _ in bars]
        if any(widths):
            axis.barh(range(len(bars)), widths, left=left, color=color, label=kind, height=0.7)
            left = [a + b for a, b in zip(left, widths, strict=True)]
    for place, (_, _, each) in enumerate(bars):
        seconds, error = each.estimate.seconds, each.estimate.error
        axis.errorbar(seconds, place, xerr=seconds * error, color="black", capsize=2, linewidth=0.8)
    axis.set_yticks(range(len(bars)), [name for name, *_ in bars], fontsize=8)
    axis.invert_yaxis()
    axis.set_xlabel("seconds of a step, with the error band")
    axis.legend(fontsize=7, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    _save(figure, path)


def _bars(placement: TimedPlacement) -> list[tuple[str, dict[str, float]]]:
    ranks = placement.estimate.per_rank
    if len(ranks) <= 1:
        return [(placement.label, placement.estimate.parts)]
    every = -(-len(ranks) // MOST_RANKS)
    return [
        (f"{placement.label}, stage {stage}", ranks[stage]) for stage in range(0, len(ranks), every)
    ]


def draw_frontier(placements: Sequence[TimedPlacement], path: Path) -> bool:
    """Dollars against days of each placement, and the line of those that none beats in both. Writes
    a PNG to `path`; returns False, and writes nothing, where no price is known."""
    points = [
        (each.cost.days, each.cost.dollars, each)
        for each in placements
        if each.cost is not None and each.cost.dollars is not None
    ]
    if not points:
        return False
    figure, axis = _figure(8)
    for days, dollars, each in points:
        cost = each.cost
        assert cost is not None
        assert cost.dollars_low is not None
        assert cost.dollars_high is not None
        reach = [[dollars - cost.dollars_low], [cost.dollars_high - dollars]]
        across = [[days - cost.days_low], [cost.days_high - days]]
        axis.errorbar(days, dollars, yerr=reach, xerr=across, color=COLORS[7], linewidth=0.8)
        axis.plot(days, dollars, "o", color=COLORS[0])
    best = frontier(points)
    for days, dollars, each in best:  # labels of the others would lie on each other
        axis.annotate(
            each.label, (days, dollars), fontsize=7, xytext=(4, 4), textcoords="offset points"
        )
    axis.plot([days for days, *_ in best], [dollars for _, dollars, _ in best], color=COLORS[4])
    axis.set_xlabel("days")
    axis.set_ylabel("dollars, between the cheapest and the dearest price")
    axis.set_xlim(left=0)
    axis.set_ylim(bottom=0)
    _save(figure, path)
    return True


def as_html(placements: Sequence[TimedPlacement], folder: Path) -> str:
    """The part of a page with both pictures, which are saved as time.png and cost.png in `folder`,
    and a table of the step's time by kind."""
    draw_times(placements, folder / "time.png")
    parts = ["<h2>Time of a step</h2>", _image(folder / "time.png", "seconds of a step by kind")]
    kinds = [kind for kind in KINDS if any(kind in each.estimate.parts for each in placements)]
    head = "".join(f"<th>{html.escape(kind)}</th>" for kind in kinds)
    parts.append(f"<table><tr><th>placement</th><th>s/step</th>{head}</tr>")
    for each in placements:
        cells = "".join(f"<td>{each.estimate.parts.get(kind, 0.0):.4g}</td>" for kind in kinds)
        total = f"{each.estimate.seconds:.4g} ±{each.estimate.error:.0%}"
        parts.append(f"<tr><td>{html.escape(each.label)}</td><td>{total}</td>{cells}</tr>")
    parts.append("</table>")
    if draw_frontier(placements, folder / "cost.png"):
        parts += ["<h2>Cost against days</h2>", _image(folder / "cost.png", "dollars by days")]
    return "\n".join(parts)


def _image(path: Path, alt: str) -> str:
    data = base64.b64encode(path.read_bytes()).decode()
    return f"<img alt='{alt}' src='data:image/png;base64,{data}'>"


def _figure(rows: int) -> tuple[Any, Any]:
    """A figure of a height for so many rows, and its axes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(9, 1.6 + 0.35 * rows), layout="constrained")
    axis.spines[["top", "right"]].set_visible(False)
    return figure, axis


def _save(figure: Any, path: Path) -> None:
    from matplotlib import pyplot

    figure.savefig(path, dpi=110)
    pyplot.close(figure)
