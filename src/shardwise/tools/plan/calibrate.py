"""Implements `shardwise plan --calibrate`, which measures this machine for use with `--on here`.

Ranks share cores, memory and links, so each number of ranks is measured separately: 1, 2, 4, ... up
to the number of accelerators or cores. The results are written to a file in the user's catalogue.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from shardwise.errors import LaunchError
from shardwise.launch import program, resources
from shardwise.net.python_command import python_words
from shardwise.tools.plan.catalogue import GIB, read_file, user_folder
from shardwise.tools.plan.cluster import HERE, name_here

EXPECTED = 40
"""Approximate number of measurements per number of ranks, for the progress bar."""

MOST_RANKS = 8


def calibrate(console: Console, file: Path | None = None) -> Path:
    """Measure this machine, write the catalogue file `file` and return its path.

    Raises LaunchError if a measurement run fails.
    """
    target = file or user_folder() / f"{HERE}.toml"
    measurements: dict[int, list[dict[str, Any]]] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        for ranks in rank_counts(resources.gpu_count(os.environ), os.cpu_count() or 1):
            task = progress.add_task(f"measuring with {ranks} rank(s)", total=EXPECTED)
            measurements[ranks] = _measure(ranks, partial(progress.update, task))
            progress.update(task, completed=EXPECTED)
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_suffix(".new")
    aside.write_text(as_toml(measurements, date.today().isoformat()))
    # Check that the catalogue can read the file, because an invalid file would make every later
    # command fail.
    read_file(aside)
    # Renaming is atomic, so an interrupted calibration leaves the old file intact.
    aside.replace(target)
    return target


def rank_counts(accelerators: int, cores: int) -> list[int]:
    """Return the numbers of ranks to measure: powers of two.

    The largest is at most MOST_RANKS, and at most the number of accelerators. Without accelerators,
    `cores` is the limit instead.
    """
    most = min(accelerators or cores, MOST_RANKS)
    return [2**power for power in range(most.bit_length()) if 2**power <= most]


def _measure(ranks: int, on_made: Callable[..., None]) -> list[dict[str, Any]]:
    """Run the calibration worker on `ranks` ranks and return the measurements."""
    with tempfile.TemporaryDirectory() as folder:
        file, log = Path(folder) / "measured.jsonl", Path(folder) / "log"
        file.touch()
        words = [*python_words("shardwise"), "run", "-n", str(ranks)]
        words += ["-m", "shardwise.tools.plan.calibration_worker", str(file)]
        with log.open("wb") as output:
            process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            )
            code = program.wait_for(
                process, lambda: on_made(completed=file.read_text().count("\n"))
            )
        if code:
            lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
            raise LaunchError(
                f"The calibration with {ranks} rank(s) failed: {lines[-1] if lines else code}"
            )
        return [json.loads(line) for line in file.read_text().splitlines()]


def as_toml(measurements: dict[int, list[dict[str, Any]]], day: str) -> str:
    """Return the text of a catalogue file for `measurements` (by number of ranks), dated `day`."""
    parts = [f'[sources.measured]\ntext = "shardwise plan --calibrate"\ndate = "{day}"\n']
    for ranks, lines in measurements.items():
        parts += _device(ranks, lines)
    return "\n".join(parts)


def _device(ranks: int, lines: Sequence[dict[str, Any]]) -> list[str]:
    """Return the TOML lines for a device and its link."""
    values = {line["kind"]: line["value"] for line in lines if "value" in line}
    rates = {
        kind: [(line["size"], line["size"] / line["seconds"]) for line in lines
               if line["kind"] == kind]
        for kind in dict.fromkeys(line["kind"] for line in lines if "size" in line)
    }  # fmt: skip
    name = name_here(ranks)
    # The peak is the best measured rate rather than the data sheet's, so that the efficiency is at
    # most 1.
    numbers = {
        f"{kind.removeprefix('matmul_')}_tflops": max(rate for _, rate in points) / 1e12
        for kind, points in rates.items()
        if kind.startswith("matmul_")
    }
    numbers["memory_gib"] = values["memory bytes"] / GIB
    numbers["memory_tb_per_s"] = max(rate for _, rate in rates["memory"]) / 1e12
    numbers["disk_gb_per_s"] = rates["disk"][0][1] / 1e9
    if "overlap" in values:
        numbers["overlap"] = values["overlap"]
    curves = {kind: _curve(points, 1e9) for kind, points in rates.items() if "matmul" in kind}
    # Dtypes that were not measured (fp16, tf32) use the curve of fp32.
    curves["matmul"] = curves["matmul_fp32"]
    curves["memory"] = _curve(rates["memory"], 1e6)
    head = [
        f"[device.{name}]",
        f'title = "this machine, {ranks} rank(s) at once"',
        f'inside = "{name}"',
        f'between = "{name}"',
        f"per_host = {ranks}",
        "calibrated = true",
        *(f"{key} = {_measured(f'{value:.6g}')}" for key, value in numbers.items()),
        "",
        f"[device.{name}.efficiency]",
        *(f"{key} = {_measured(curve)}" for key, curve in curves.items()),
        f"launch_us = {_measured(format(values['launch'] * 1e6, '.4g'))}",
        "",
    ]
    return [*head, *_link(name, ranks, lines)]


def _link(name: str, ranks: int, lines: Sequence[dict[str, Any]]) -> list[str]:
    """Return the TOML lines for the link between ranks.

    The bandwidth is the slope between the smallest and the largest message. The latency per hop is
    derived from the remaining time of the smallest message. With one rank, the link is a
    placeholder that is never used.
    """
    reduced = sorted((x["size"], x["seconds"]) for x in lines if x["kind"] == "all_reduce")
    bandwidth, latency = 1.0, 1.0
    if reduced:
        moved = 2 * (ranks - 1) / ranks
        (small, fast), (large, slow) = reduced[0], reduced[-1]
        # The latency cancels out in the slope between the two sizes.
        bandwidth = moved * (large - small) / max(1e-9, slow - fast) / 1e9
        hops = 2 * (ranks - 1)
        latency = max(0.01, (fast - moved * small / bandwidth / 1e9) / hops * 1e6)
    return [
        f"[link.{name}]",
        f'title = "between ranks of this machine, {ranks} at once"',
        f"gb_per_s = {_measured(f'{bandwidth:.6g}')}",
        f"latency_us = {_measured(f'{latency:.4g}')}",
        "",
    ]


def _curve(points: Sequence[tuple[float, float]], unit: float) -> str:
    """Return the efficiency curve as TOML: the fraction of the best rate at each size in `unit`."""
    # Fractions, because the catalogue stores the peak separately.
    best = max(rate for _, rate in points)
    pairs = [f"[{size / unit:.6g}, {max(1e-6, rate / best):.4g}]" for size, rate in points]
    return f"[{', '.join(pairs)}]"


def _measured(value: str) -> str:
    return f'{{ value = {value}, from = "measured" }}'
