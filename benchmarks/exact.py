"""The exact mode: the same bits on any number of workers, and what that costs.

    python benchmarks/exact.py [--exact 4] [--steps 300] [--models gpt,convnet,lstm] \
        [--runs 1:0,2:0,2:3,4:2] [--json FILE]

A GPT and an LSTM with dropout and a convnet with BatchNorm train for some hundred steps, on
several numbers of workers and rows, with `--exact` and without it. The hash is of all losses and
norms, parameters, buffers and optimizer state; with the exact mode there must be one per model.
Times are medians per step, all with one thread per worker; without it each worker runs its share
in one piece.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

import machine

WORKER = Path(__file__).with_name("exact_worker.py")


@dataclass(frozen=True)
class Trained:
    """What one training came to."""

    hash: str
    loss: float
    ms: float


@dataclass(frozen=True)
class Line:
    """One number of workers and row, in the exact mode and without it."""

    model: str
    workers: int
    zero: int
    exact: Trained
    plain: Trained


def main(arguments: Sequence[str] | None = None) -> int:
    """Train everything and print one table; 1 when bits differ in the exact mode."""
    options = _parser().parse_args(arguments)
    console, facts = Console(), machine.describe()
    for name, value in facts.items():
        console.print(f"{name:>9}  {value}", highlight=False, soft_wrap=True)
    lines = []
    for model in options.models.split(","):
        for workers, zero in options.runs:
            with console.status(f"{model}, {workers} workers, ZERO_{zero}"):
                lines.append(_line(model, workers, zero, options))
    console.print(_table(lines, options))
    found = {(line.model, line.exact.hash) for line in lines}
    seen = [model for model, _ in found]
    differing = sorted(model for model in set(seen) if seen.count(model) > 1)
    said = f"BITS DIFFER: {', '.join(differing)}" if differing else "bits are equal, model by model"
    console.print(f"with --exact {options.exact} {said}", highlight=False)
    if options.json:
        written = {"machine": facts, "steps": options.steps, "lines": list(map(asdict, lines))}
        options.json.write_text(json.dumps(written, indent=1) + "\n")
    return 1 if differing else 0


def _line(model: str, workers: int, zero: int, options: argparse.Namespace) -> Line:
    def train(*flags: str) -> Trained:
        return _train(model, options.steps, "-n", str(workers), "--zero", str(zero), *flags)

    return Line(model, workers, zero, train("--exact", str(options.exact)), train())


def _train(model: str, steps: int, *flags: str) -> Trained:
    """One run of its own."""
    command = [sys.executable, "-m", "shardwise", "run", *flags, str(WORKER), model, str(steps)]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SHARDWISE_")}
    done = subprocess.run(
        command,
        env=environment | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command[3:])}: ended with exit code {done.returncode}")
    line = done.stdout.splitlines()[-1]
    return Trained(**json.loads(line[line.index("{") :]))


def _table(lines: Sequence[Line], options: argparse.Namespace) -> Table:
    title = f"{options.steps} steps, cut into {options.exact} micro-shards"
    drawn = Table(box=SIMPLE, title=title, title_justify="left")
    drawn.add_column("model", no_wrap=True)
    drawn.add_column("workers, row", no_wrap=True)
    drawn.add_column("hash", no_wrap=True)
    for name in ("ms/step", "without", "ratio", "loss without"):
        drawn.add_column(name, justify="right")
    for line in lines:
        drawn.add_row(
            line.model,
            f"{line.workers} x ZERO_{line.zero}",
            line.exact.hash,
            f"{line.exact.ms:.1f}",
            f"{line.plain.ms:.1f}",
            f"{line.exact.ms / line.plain.ms:.2f}",
            f"{line.plain.loss:.7f}",
        )
    return drawn


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--exact", type=int, default=4, metavar="V")
    parser.add_argument("--steps", type=int, default=300, metavar="N")
    parser.add_argument("--models", default="gpt,convnet,lstm", metavar="NAMES")
    parser.add_argument(
        "--runs", type=_runs, default="1:0,2:0,2:3,4:2", metavar="N:Z,...", help="workers:row"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser


def _runs(text: str) -> list[tuple[int, int]]:
    """Numbers of workers and levels of rows, from 1:0,2:3."""
    pairs = [pair.split(":") for pair in text.split(",")]
    return [(int(workers), int(zero)) for workers, zero in pairs]


if __name__ == "__main__":
    sys.exit(main())
