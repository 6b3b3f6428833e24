"""What activations cost: kept, recomputed, and moved to a disk.

    python benchmarks/activations.py --disk FOLDER [--steps 4] [--json FILE] [--plot FILE]

A GPT whose activations are many times its states trains on one worker, each way in a process of
its own. Peak is the highest resident set of anonymous memory while the steps ran, less what the
process held before it had a model; ms is the median step. Losses must agree to the last bit.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

import machine
from residents import MB, own_memory
from workloads import Gpt

WAYS = {
    "kept": {},
    "recomputed": {"activations": "recomputed"},
    "kept, nvme": {"offload_activations": "nvme:{disk}"},
    "recomputed, nvme": {"activations": "recomputed", "offload_activations": "nvme:{disk}"},
}
WARM_UP = 2
SAMPLED = 0.005
"""Seconds between two looks at the resident set."""


@dataclass(frozen=True)
class Line:
    """What one way took."""

    name: str
    ms: float
    peak: int
    states: int
    losses: list[float]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure every way and print one table; 1 when two of them trained something else."""
    options = _parser().parse_args(arguments)
    if options.way:
        print(json.dumps(asdict(_measure(options))))
        return 0
    console, facts = Console(), machine.describe()
    for name, value in facts.items():
        console.print(f"{name:>9}  {value}", highlight=False, soft_wrap=True)
    lines = []
    for way in WAYS:
        with console.status(way):
            lines.append(_in_a_process(way, arguments))
    workload = _workload(options)
    console.print(_table(workload, lines))
    agree = all(line.losses == lines[0].losses for line in lines)
    console.print("losses are equal, bit for bit" if agree else "LOSSES DIFFER", highlight=False)
    if options.json:
        written = {"machine": facts, "workload": asdict(workload), "ways": list(map(asdict, lines))}
        options.json.write_text(json.dumps(written, indent=1) + "\n")
    if options.plot:
        _plot(lines, options.plot, f"{workload.describe()} · {facts['machine']}")
    return 0 if agree else 1


def _in_a_process(way: str, arguments: Sequence[str] | None) -> Line:
    given = sys.argv[1:] if arguments is None else list(arguments)
    command = [sys.executable, __file__, *given, "--way", way]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{way}: ended with exit code {done.returncode}")
    return Line(**json.loads(done.stdout.splitlines()[-1]))


def _measure(options: argparse.Namespace) -> Line:
    """Train one way in this process. Imports what the parent process has no use for."""
    import torch

    import models
    import shardwise as sw

    torch.set_num_threads(machine.cores())
    empty = own_memory() or 0
    workload = _workload(options)
    sw.init(seed=0, quiet=True, device="cpu")
    model = models.build(workload)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    settings = {key: text.format(disk=options.disk) for key, text in WAYS[options.way].items()}
    engine = sw.Engine(model, optimizer, **settings)
    losses: list[float] = []

    def step(inputs: Any, targets: Any) -> None:
        engine.backward(models.loss_of(model, inputs, targets))
        losses.append(engine.step().loss)

    batches = cycle(models.batches(workload, 0, 1))
    for batch in islice(batches, WARM_UP):
        step(*batch)
    times: list[float] = []

    def timed() -> None:
        for batch in islice(batches, options.steps):
            begun = time.monotonic()
            step(*batch)
            times.append((time.monotonic() - begun) * 1e3)

    peak = _highest(timed)
    return Line(options.way, median(times), peak - empty, engine.state_bytes, losses)


def _highest(work: Callable[[], None]) -> int:
    """The highest resident set, in bytes, seen while `work` runs."""
    over = threading.Event()
    seen = [own_memory() or 0]

    def look() -> None:
        while not over.wait(SAMPLED):
            seen.append(own_memory() or 0)

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        work()
    finally:
        over.set()
        watcher.join()
    return max(seen)


def _table(workload: Gpt, lines: Sequence[Line]) -> Table:
    drawn = Table(box=SIMPLE, title=workload.describe(), title_justify="left")
    drawn.add_column("activations", no_wrap=True)
    for name in ("peak MB", "of it states", "over kept", "ms/step", "over kept"):
        drawn.add_column(name, justify="right")
    first = lines[0]
    for line in lines:
        drawn.add_row(
            line.name,
            f"{line.peak / MB:,.0f}",
            f"{line.states / MB:,.0f}",
            f"{line.peak / first.peak:.2f}",
            f"{line.ms:,.0f}",
            f"{line.ms / first.ms:.2f}",
        )
    return drawn


def _plot(lines: Sequence[Line], path: Path, caption: str) -> None:
    """Two bars per way: its peak, with the states' part marked, and its step time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 2.6), layout="constrained")
    names, colours = [line.name for line in lines], ["#94a3b8"] + ["#c2410c"] * (len(lines) - 1)
    charts = (
        (left, "MB, highest in a step", [line.peak / MB for line in lines]),
        (right, "ms per step", [line.ms for line in lines]),
    )
    for axes, title, values in charts:
        bars = axes.barh(names, values, color=colours, height=0.7)
        axes.bar_label(bars, [f"{value:,.0f}" for value in values], padding=3, fontsize=8)
        axes.set_title(title, fontsize=9)
        axes.invert_yaxis()
        axes.margins(x=0.14)
        axes.spines[["top", "right"]].set_visible(False)
    left.axvline(lines[0].states / MB, color="black", linewidth=1, linestyle="--", label="states")
    left.legend(fontsize=7)
    figure.supxlabel(caption, fontsize=7, color="#64748b")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _workload(options: argparse.Namespace) -> Gpt:
    names = ("width", "layers", "vocabulary", "sequence", "batch")
    return Gpt(name="activations", **{name: getattr(options, name) for name in names})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--disk", required=True, metavar="FOLDER", help="on a disk, not on tmpfs")
    parser.add_argument("--steps", type=int, default=4, metavar="N")
    sizes = {"width": 256, "layers": 12, "vocabulary": 2048, "sequence": 512, "batch": 8}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
