"""Starts an example once at each number of workers, and reads what each run found."""

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
"""Where a run is to write what it found, as JSON."""


def sizes(text: str) -> list[int]:
    """The numbers of workers in "1,2,4,8"."""
    try:
        found = sorted({int(part) for part in text.split(",")})
    except ValueError:
        found = []
    if not found or found[0] < 1:
        raise argparse.ArgumentTypeError(f"takes numbers of workers such as 1,2,4, not {text!r}")
    return found


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that an example needs for `run_each`."""
    parser.add_argument(
        "--workers",
        type=sizes,
        metavar="1,2,4",
        help="run once at each of these numbers of workers, and compare",
    )
    parser.add_argument(RESULT_FLAG, type=Path, metavar="FILE", help="write what was found as JSON")


def run_each(script: str, workers: Sequence[int], arguments: Sequence[str]) -> dict[int, Any]:
    """What `script` writes to its --result on each number of workers; exits where one fails.

    `arguments` are this process's own; --workers and --result in them are left out.
    """
    if "SHARDWISE_LAUNCH_RANK" in os.environ:
        sys.exit("--workers starts the ranks itself: run it with python, not `shardwise run`.")
    passed = _without(arguments, ("--workers", RESULT_FLAG))
    # Threads are shared out alike at every size, else one worker would have what many share.
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
    """`arguments` without `flags` and their values."""
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
