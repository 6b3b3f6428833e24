"""Time of `shardwise verify --stock` for a correct script of a small model.

    python benchmarks/verify_time.py [--ranks 2] [--times 3] [SCRIPT [ARGUMENTS]]

Most of the time is the start of processes: a correct script needs four runs, on the ranks and in
one process, in fp32 and in fp64. CPU time is that of all processes, and depends less than wall time
on what else the machine does.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from resource import RUSAGE_CHILDREN

import figure
from machine import cpu_seconds

SCRIPT = "tests/system/scripts/stock_correct.py"
ROOT = Path(__file__).parents[1]


def measure(words: list[str], ranks: int) -> tuple[float, float]:
    """Return wall seconds and CPU seconds of one verification."""
    with tempfile.TemporaryDirectory(prefix="verify-time-") as folder:
        command = [sys.executable, "-m", "shardwise", "verify", "-n", str(ranks), "--stock"]
        command += ["--accept", "rounding", "--out", folder, *words]
        used, began = cpu_seconds(RUSAGE_CHILDREN), time.perf_counter()
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        took = time.perf_counter() - began
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    return took, cpu_seconds(RUSAGE_CHILDREN) - used


def main() -> None:
    """Measure, and print medians."""
    flags = figure.parser(__doc__ or "")
    flags.add_argument("--ranks", type=figure.positive, default=2, metavar="N")
    flags.add_argument("--times", type=figure.positive, default=3, metavar="N")
    flags.add_argument("script", nargs=argparse.REMAINDER, help=f"default {SCRIPT} tied")
    options = flags.parse_args()
    words = options.script or [SCRIPT, "tied"]
    facts = figure.begin(load=f"{os.getloadavg()[0]:.1f} processes that want to run")
    measured = [measure(words, options.ranks) for _ in range(options.times)]
    wall, cpu = (statistics.median(each) for each in zip(*measured, strict=True))
    heads = ["script", "ranks", "wall, s", "CPU of all processes, s"]
    row = [words[0], str(options.ranks), f"{wall:.1f}", f"{cpu:.1f}"]
    figure.show(*figure.table(heads, [row]))
    figure.keep(options, facts, words=words, measured=measured)


if __name__ == "__main__":
    main()
