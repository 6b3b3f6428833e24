"""Runs of an example at several numbers of workers, and their results."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RESULT_FLAG = "--result"
"""The flag with the file to which a run writes its result, as JSON."""


def sizes(text: str) -> list[int]:
    """Parse numbers of workers such as "1,2,4,8"."""
    try:
        numbers = sorted({int(part) for part in text.split(",")})
    except ValueError:
        numbers = []
    if not numbers or numbers[0] < 1:
        raise argparse.ArgumentTypeError(f"needs numbers of workers such as 1,2,4, not {text!r}")
    return numbers


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that an example needs for `run_each`."""
    parser.add_argument(
        "--workers",
        type=sizes,
        metavar="1,2,4",
        help="run once at each of these numbers of workers, and compare",
    )
    parser.add_argument(RESULT_FLAG, type=Path, metavar="FILE", help="write the result as JSON")


def run_each(script: str, workers: Sequence[int], arguments: Sequence[str]) -> dict[int, Any]:
    """Run `script` at each number of workers, and return the results. Exits if one fails.

    `arguments` are passed on, except --workers and --result.
    """
    if "SHARDWISE_LAUNCH_RANK" in os.environ:
        sys.exit("--workers starts the ranks itself: start it with python, not `shardwise run`.")
    passed = _without(arguments, ("--workers", RESULT_FLAG))
    # Every worker has the same number of threads at every size. Otherwise a single worker would use
    # the cores that several workers share, and the sizes could not be compared.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = str(max(1, (cores or 1) // max(workers)))
    environ = {"OMP_NUM_THREADS": threads} | os.environ
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for size in workers:
            print(f"== {size} worker{'s' * (size > 1)}", flush=True)
            result = Path(folder) / f"{size}.json"
            run = [sys.executable, "-m", "shardwise", "run", "-n", str(size)]
            code = subprocess.call([*run, script, *passed, RESULT_FLAG, str(result)], env=environ)
            if code:
                sys.exit(code)
            found[size] = json.loads(result.read_text())
    return found


def _without(arguments: Sequence[str], flags: Sequence[str]) -> list[str]:
    """Return `arguments` without `flags` and their values."""
    kept: list[str] = []
    skip = False
    for word in arguments:
        if skip:
            skip = False
        elif word in flags:
            skip = True
        elif word.split("=")[0] not in flags:
            kept.append(word)
    return kept
