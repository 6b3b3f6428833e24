"""The pictures: bars of step time and memory for a result file, curves of strong scaling, and the
picture of README.md.

    python benchmarks/plot.py benchmarks/results/2026-11-23-step-time.json docs/step_time.png
    python benchmarks/plot.py --scaling RESULT.json PICTURE.png

The first command draws the picture of README.md from a result file of step_time.py, and prints the
Markdown that shows it, with the date and the command of the run.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

from figure import MB, milliseconds
from report import Row

matplotlib.use("Agg")
from matplotlib import pyplot

OURS, THEIRS, FLOOR = "#c2410c", "#94a3b8", "#e2e8f0"
RANKS = 2
"""The number of ranks that README.md shows."""

NAMES = {
    "A": "A: a GPT, bound by arithmetic",
    "C": "C: a GPT, bound by communication",
    "R": "R: a ResNet-34",
}


def save(results: Sequence[Row], path: Path, caption: str) -> None:
    """Draw one row of two charts per table: step time with the limit as a line, and memory."""
    shown = [_shown(result) for result in results]
    heights = [0.6 + 0.28 * len(rows) for rows in shown]
    drawing, axes = pyplot.subplots(
        len(results),
        2,
        figsize=(11, sum(heights) + 1.0),
        squeeze=False,
        layout="constrained",
        height_ratios=heights,
        width_ratios=[3, 2],
    )
    for (left, right), result, rows in zip(axes, results, shown, strict=True):
        name = f"{result['configuration']['name']}, {result['ranks']} ranks"
        _bars(left, rows, [row["median_ms"] for row in rows])
        title = f"{name}: ms per step"
        if result["limit_ms"] is not None:
            left.axvline(result["limit_ms"], color="black", linewidth=1, linestyle="--")
            title += f" (dashed: the limit, {milliseconds(result['limit_ms'])})"
        left.set_title(title, fontsize=9, loc="left")
        peaks = [row["peak_bytes"] for row in rows]
        _bars(right, rows, [None if peak is None else peak / MB for peak in peaks])
        right.set_yticklabels([])
        right.set_title("MB per rank, highest in a step", fontsize=9, loc="left")
    drawing.supxlabel(caption, fontsize=7, color="#64748b")
    _write(drawing, path, dpi=150)


def scaling(results: Sequence[Row], path: Path, caption: str) -> None:
    """Draw speed-up over the number of ranks, a line per contender and one for the cores."""
    drawing, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    sizes = [result["ranks"] for result in results]
    axes.plot(
        sizes, [min(n, results[0]["cores"]) for n in sizes], "k--", linewidth=1, label="cores"
    )
    for index, row in enumerate(results[0]["contenders"]):
        over = [result["contenders"][index]["over_plain"] for result in results]
        known = [(ranks, 1 / value) for ranks, value in zip(sizes, over, strict=True) if value]
        if known and row["key"] != "plain":
            style = "-" if row["label"].startswith("Shardwise") else ":"
            label = row["label"]
            axes.plot(*zip(*known, strict=True), style, marker="o", markersize=4, label=label)
    axes.set_xscale("log", base=2)  # ranks double from point to point
    axes.set_xticks(sizes, [str(ranks) for ranks in sizes])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("ranks, one thread each")
    axes.set_ylabel("times faster than one process")
    axes.legend(fontsize=8, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    drawing.supxlabel(caption, fontsize=7, color="#64748b")
    _write(drawing, path, dpi=150)


def main() -> None:
    """Draw one chart per configuration at two ranks, and print the Markdown of the picture."""
    parser = argparse.ArgumentParser(description="The picture of README.md.")
    parser.add_argument("path", type=Path, help="the file that step_time.py wrote to --json")
    parser.add_argument("picture", type=Path, help="the file of the picture, below docs/")
    parser.add_argument("--scaling", action="store_true", help="speed-up over the ranks")
    options = parser.parse_args()
    whole = json.loads(options.path.read_text())
    if options.scaling:
        scaling(whole["results"], options.picture, whole["machine"]["machine"])
        return
    by_name = {r["configuration"]["name"]: r for r in whole["results"] if r["ranks"] == RANKS}
    results = [by_name[name] for name in NAMES if name in by_name]
    drawing, axes = pyplot.subplots(1, len(results), figsize=(11, 3.6), layout="constrained")
    for chart, result in zip(axes, results, strict=True):
        rows = _shown(result)
        _bars(chart, rows, [row["median_ms"] for row in rows])
        chart.tick_params(axis="y", labelleft=chart is axes[0], length=0)
        chart.set_xticks([])
        chart.spines["bottom"].set_visible(False)
        name = NAMES[result["configuration"]["name"]]
        chart.set_title(f"{name}, ms per step", fontsize=9, loc="left")
    _write(drawing, options.picture, dpi=110)
    machine, method = whole["machine"], whole["method"]
    print(f"![{_words(results)}](docs/{options.picture.name})\n")
    print(
        f"*Milliseconds per step, {RANKS} ranks, one thread each ({machine['machine']}; "
        f"{machine['versions']}; {machine['date']}; medians of {method['rounds']} rounds of "
        f"{method['steps']} steps): `{machine['command']}`*"
    )


def _words(results: Sequence[Row]) -> str:
    """Describe the picture for those who do not see it."""
    said = []
    for result in results:
        times = {row["key"]: row["median_ms"] for row in result["contenders"]}
        ours = [milliseconds(times[f"shardwise-{zero}"]) for zero in range(4)]
        name = result["configuration"]["name"]
        said.append(f"{name}: DDP {milliseconds(times['ddp'])}, Shardwise {', '.join(ours)}")
    return f"Milliseconds per step on {RANKS} ranks. {'; '.join(said)}"


def _shown(result: Row) -> list[Row]:
    """Return the contenders that ran, without the one process that the limit stands for."""
    return [row for row in result["contenders"] if row["key"] != "plain" and row["rounds_ms"]]


def _bars(axes: Any, rows: Sequence[Row], values: Sequence[float | None]) -> None:
    """Draw a bar with its number for each contender: ours, the peers, and the lower bound."""
    colours = [
        FLOOR if row["key"] == "apart" else OURS if row["key"].startswith("shardwise") else THEIRS
        for row in rows
    ]
    bars = axes.barh(range(len(rows)), [v or 0.0 for v in values], color=colours, height=0.7)
    axes.bar_label(bars, [milliseconds(value) for value in values], padding=3, fontsize=7)
    axes.set_yticks(range(len(rows)), [row["label"] for row in rows], fontsize=8)
    axes.set_ylim(len(rows) - 0.4, -0.8)
    axes.margins(x=0.12)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="x", labelsize=7)


def _write(drawing: Any, path: Path, dpi: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    drawing.savefig(path, dpi=dpi)
    pyplot.close(drawing)


if __name__ == "__main__":
    main()
