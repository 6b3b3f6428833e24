"""Shows whose gradient is that of the mean over all items: of the libraries, and with exact_mean.

    python benchmarks/exact_mean.py --ranks 2 --json benchmarks/results/today-exact-mean.json

Steps of 16 rows in two micro-batches and a last one of 5; rows have other numbers of labels. Each
figure is the norm of a step's gradient over that of plain PyTorch, which has the whole batch of the
step at once: 1 is right. The learning rate is 0, so that all steps have the same weights.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

import machine
from exact_mean_worker import CASES

WORKER = Path(__file__).with_name("exact_mean_worker.py")
RIGHT = 1e-5
"""Norms that differ by less, in parts of 1, are rounded otherwise."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; 1 where the exact mean is none."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--ranks", type=int, default=2, metavar="N", choices=(2, 4))
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=CASES, metavar="CASE")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    options = parser.parse_args(arguments)
    console, about = Console(width=110), machine.describe()
    for name, value in about.items():
        console.print(f"{name:>9}  {value}", highlight=False, soft_wrap=True)
    found = {name: _measured(name, options.ranks) for name in options.cases}
    console.print(_table(found, options.ranks))
    if options.json:
        machine.write_json(options.json, {"machine": about, "ranks": options.ranks, "cases": found})
    wrong = [n for n, lines in found.items() for x in lines["ours"] if abs(x - 1) > RIGHT]
    return 1 if wrong else 0


def _measured(name: str, ranks: int) -> dict[str, list[float]]:
    """The norms of one case over plain PyTorch's, by step."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    shardwise = ["-m", "shardwise", "run", "-n", str(ranks), "--zero", "3", "--device", "cpu"]
    right = _norms([], "plain", name)
    several = {"SIZE": str(ranks), "ACCELERATE_USE_CPU": "true"}
    lines = {
        "one": _norms([], "stock", name, ACCELERATE_USE_CPU="true"),
        "stock": _norms(torchrun, "stock", name, **several),
        "ours": _norms(shardwise, "ours", name, **several),
    }
    return {who: [a / b for a, b in zip(n, right, strict=True)] for who, n in lines.items()}


def _norms(launcher: list[str], who: str, name: str, **variables: str) -> list[float]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | variables
    with tempfile.TemporaryDirectory(prefix="exact-mean-") as folder:
        done = subprocess.run(
            [sys.executable, *launcher, str(WORKER), who, name],
            env=environment, cwd=folder, capture_output=True, text=True, check=False, timeout=300,
        )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{who}, {name}: {done.stdout}{done.stderr}")
    (line,) = [line for line in done.stdout.splitlines() if '{"norms"' in line]
    norms: list[float] = json.loads(line[line.index("{") :])["norms"]
    return norms


def _table(found: dict[str, dict[str, list[float]]], ranks: int) -> Table:
    title = f"norm of the gradient over plain PyTorch's · steps of 16 rows and of 5 · {ranks} ranks"
    drawn = Table(box=SIMPLE, title=title, title_justify="left", title_style="bold")
    heads = ("one process", f"{ranks} ranks, DDP", f"{ranks} ranks, exact_mean, ZERO_3")
    for name in ("", "", *heads):
        drawn.add_column(name, justify="right" if name else "left", no_wrap=True)
    for name, lines in found.items():
        case = CASES[name]
        cells = [", ".join(_shown(x) for x in lines[who]) for who in ("one", "stock", "ours")]
        drawn.add_row(case.by, case.label, *cells)
    return drawn


def _shown(ratio: float) -> Any:
    """1 where it is right, to what fp32 can tell."""
    return "1" if abs(ratio - 1) < RIGHT else f"{ratio:.3f}"


if __name__ == "__main__":
    sys.exit(main())
