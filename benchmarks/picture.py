"""The picture of README.md: step time beside the peers, from a result file.

    python benchmarks/picture.py benchmarks/results/2026-11-23-step-time.json docs/step_time.png

It prints the Markdown that shows the picture, with the date and the command of the run.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

from report import milliseconds

matplotlib.use("Agg")
from matplotlib import pyplot

OURS, THEIRS, FLOOR = "#c2410c", "#94a3b8", "#e2e8f0"
RANKS = 2
NAMES = {
    "A": "A: a GPT, bound by arithmetic",
    "C": "C: a GPT, bound by communication",
    "R": "R: a ResNet-34",
}


def main() -> None:
    """Draw one chart per configuration at two ranks, and print the Markdown of the picture."""
    parser = argparse.ArgumentParser(description="The picture of README.md.")
    parser.add_argument("path", type=Path, help="what step_time.py wrote to --json")
    parser.add_argument("picture", type=Path, help="where the picture goes, below docs/")
    options = parser.parse_args()
    whole = json.loads(options.path.read_text())
    by_name = {each["configuration"]["name"]: each for each in whole["results"] if _shown(each)}
    results = [by_name[name] for name in NAMES if name in by_name]
    _draw(results, options.picture)
    print(f"![{_words(results)}](docs/{options.picture.name})\n")
    print(_caption(whole["machine"], whole["method"]))


def _shown(result: Mapping[str, Any]) -> bool:
    return bool(result["ranks"] == RANKS)


def _draw(results: Sequence[Mapping[str, Any]], path: Path) -> None:
    figure, axes = pyplot.subplots(1, len(results), figsize=(11, 3.6), layout="constrained")
    for chart, result in zip(axes, results, strict=True):
        lines = _lines(result)
        times = [line["median_ms"] for line in lines]
        colours = [_colour(line["key"]) for line in lines]
        bars = chart.barh(range(len(lines)), times, color=colours, height=0.7)
        chart.bar_label(bars, [milliseconds(each) for each in times], padding=3, fontsize=7)
        chart.set_yticks(range(len(lines)), [line["label"] for line in lines], fontsize=8)
        chart.tick_params(axis="y", labelleft=chart is axes[0], length=0)
        chart.set_ylim(len(lines) - 0.4, -0.6)
        chart.margins(x=0.12)
        chart.set_xticks([])
        chart.spines[["top", "right", "bottom"]].set_visible(False)
        name = NAMES[result["configuration"]["name"]]
        chart.set_title(f"{name}, ms per step", fontsize=9, loc="left")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _lines(result: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The contenders that share the work, the one process left out."""
    return [line for line in result["contenders"] if line["key"] != "plain" and not line["note"]]


def _colour(key: str) -> str:
    if key == "apart":
        return FLOOR
    return OURS if key.startswith("shardwise") else THEIRS


def _words(results: Sequence[Mapping[str, Any]]) -> str:
    """What the picture shows, for those who do not see it."""
    said = []
    for result in results:
        times = {line["key"]: line["median_ms"] for line in result["contenders"]}
        ours = [milliseconds(times[f"shardwise-{row}"]) for row in range(4)]
        name = result["configuration"]["name"]
        said.append(f"{name}: DDP {milliseconds(times['ddp'])}, Shardwise {', '.join(ours)}")
    return f"Milliseconds per step on {RANKS} ranks. {'; '.join(said)}"


def _caption(machine: Mapping[str, str], method: Mapping[str, Any]) -> str:
    return (
        f"*Milliseconds per step, {RANKS} ranks, one thread each ({machine['machine']}; "
        f"{machine['versions']}; {machine['date']}; medians of {method['rounds']} rounds of "
        f"{method['steps']} steps): `{machine['command']}`*"
    )


if __name__ == "__main__":
    main()
