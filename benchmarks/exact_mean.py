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
    found = _measured(options.cases, options.ranks)
    console.print(_table(found, options.ranks))
    if options.json:
        machine.write_json(options.json, {"machine": about, "ranks": options.ranks, "cases": found})
    wrong = [n for n, lines in found.items() for x in lines["ours"] if abs(x - 1) > RIGHT]
    return 1 if wrong else 0


def _measured(cases: Sequence[str], ranks: int) -> dict[str, dict[str, list[float]]]:
    """By case, the norms of each of three over plain PyTorch's, by step."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    shardwise = ["-m", "shardwise", "run", "-n", str(ranks), "--zero", "3", "--device", "cpu"]
    right = _norms([], "plain", cases)
    lines = {
        "one": _norms([], "stock", cases),
        "stock": _norms(torchrun, "stock", cases, ranks),
        "ours": _norms(shardwise, "ours", cases, ranks),
    }
    return {
        case: {who: _over(norms[case], right[case]) for who, norms in lines.items()}
        for case in cases
    }


def _over(norms: Sequence[float], right: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(norms, right, strict=True)]


def _norms(
    launcher: list[str], who: str, cases: Sequence[str], ranks: int = 1
) -> dict[str, list[float]]:
    variables = {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "ACCELERATE_USE_CPU": "true",
        "SIZE": str(ranks),
    }
    with tempfile.TemporaryDirectory(prefix="exact-mean-") as folder:
        done = subprocess.run(
            [sys.executable, *launcher, str(WORKER), who, *cases],
            env=os.environ | variables, cwd=folder, capture_output=True, text=True, check=False,
        )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{who}: {done.stdout}{done.stderr}")
    (line,) = [line for line in done.stdout.splitlines() if '{"norms"' in line]
    norms: dict[str, list[float]] = json.loads(line[line.index("{") :])["norms"]
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
