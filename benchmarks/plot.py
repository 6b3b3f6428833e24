"""Two bars per contender: step time, with the limit as a line, and the resident set beside it;
and the lines of strong scaling."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

from figures import Line
from report import Result, milliseconds
from residents import MB

matplotlib.use("Agg")
from matplotlib import pyplot

OURS, THEIRS = "#c2410c", "#94a3b8"


def save(results: Sequence[Result], path: Path, caption: str) -> None:
    """Draw one row of two charts per table."""
    heights = [0.6 + 0.28 * len(_shown(result)) for result in results]
    figure, axes = pyplot.subplots(
        len(results),
        2,
        figsize=(11, sum(heights) + 1.0),
        squeeze=False,
        layout="constrained",
        height_ratios=heights,
        width_ratios=[3, 2],
    )
    for (left, right), result in zip(axes, results, strict=True):
        _times(left, result)
        _memory(right, result)
    figure.supxlabel(caption, fontsize=7, color="#64748b")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def scaling(
    curves: Mapping[str, Mapping[int, float | None]], cores: int, path: Path, caption: str
) -> None:
    """Draw speed-up over the number of ranks, a line per contender and one for the cores."""
    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    sizes = sorted({ranks for curve in curves.values() for ranks in curve})
    axes.plot(sizes, [min(n, cores) for n in sizes], "k--", linewidth=1, label="cores")
    for label, curve in curves.items():
        ours = label.startswith("Shardwise")
        known = [(ranks, value) for ranks, value in sorted(curve.items()) if value is not None]
        style = "-" if ours else ":"
        if not known:
            continue
        axes.plot(*zip(*known, strict=True), style, marker="o", markersize=4, label=label)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(ranks) for ranks in sizes])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("ranks, one thread each")
    axes.set_ylabel("times faster than one process")
    axes.legend(fontsize=8, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.supxlabel(caption, fontsize=7, color="#64748b")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _times(axes: Any, result: Result) -> None:
    lines = _shown(result)
    _bars(axes, lines, [line.median for line in lines])
    title = f"{result.workload.name}, {result.ranks} ranks: ms per step"
    if result.limit is not None:
        axes.axvline(result.limit, color="black", linewidth=1, linestyle="--")
        title += f" (dashed: the limit, {milliseconds(result.limit)})"
    axes.set_title(title, fontsize=9, loc="left")


def _memory(axes: Any, result: Result) -> None:
    lines = _shown(result)
    peaks = [None if line.peak is None else line.peak / MB for line in lines]
    _bars(axes, lines, peaks)
    axes.set_yticklabels([])
    axes.set_title("MB per rank, highest in a step", fontsize=9, loc="left")


def _bars(axes: Any, lines: Sequence[Line], values: Sequence[float | None]) -> None:
    lengths = [value or 0.0 for value in values]
    colours = [OURS if line.key.startswith("shardwise") else THEIRS for line in lines]
    bars = axes.barh(range(len(lines)), lengths, color=colours, height=0.7)
    axes.bar_label(bars, [milliseconds(value) for value in values], padding=3, fontsize=7)
    axes.set_yticks(range(len(lines)), [line.label for line in lines], fontsize=8)
    axes.set_ylim(len(lines) - 0.4, -0.8)
    axes.margins(x=0.12)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="x", labelsize=7)


def _shown(result: Result) -> list[Line]:
    """The contenders that ran, without the one process that the limit stands for."""
    return [line for line in result.lines[1:] if line.rounds]
