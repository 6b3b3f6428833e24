"""The cost of --guard in a run without errors.

    python benchmarks/guard.py [--config C] [--ranks 2] [--rows 0,3] [--every 100] [--checks 4]

Two engines with the same model, one of them guarded, take each step one after the other in the same
processes, and the order changes from step to step. Load of other processes therefore affects both.
Every K-th step is a checked step, in which the guard computes the step twice and compares copies.
CPU time is the sum over all ranks.

The cost over a period of K steps is

    median of the checked steps + (K - 1) x median of the other steps
    -----------------------------------------------------------------  -  1
                    K x median of the steps without a guard

Medians leave out the few steps that another process of the machine interrupts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import figure
import workloads
from machine import cpu_seconds

WARM = 5
"""Steps that are not counted."""


def work(path: str, config: str, checks: int, every: int) -> None:
    """Train both engines, and write this run's times by kind of step."""
    import torch

    import models
    import shardwise as sw

    torch.set_num_threads(1)
    world = sw.init(seed=0)
    workload = workloads.CONFIGURATIONS[config]
    batches = cycle(models.batches(workload, world.rank, world.size))
    steps: dict[str, Callable[[Any, Any], None]] = {}
    for name, guard in (("plain", None), ("guarded", every)):
        model = models.build(workload)
        optimizer = torch.optim.AdamW(model.parameters(), lr=workload.lr, fused=True)
        engine = sw.Engine(model, optimizer, guard=guard, quiet=True)

        def step(x: Any, y: Any, model: Any = model, engine: sw.Engine = engine) -> None:
            engine.backward(models.loss_of(model, x, y), weight=len(x))
            engine.step()

        steps[name] = step
    found: dict[str, list[tuple[float, float]]] = {"plain": [], "guarded": [], "checked": []}
    for number in range(1, every * checks + 1):
        batch = next(batches)
        order = list(steps)[:: 1 if number % 2 else -1]
        for name in order:
            world.barrier()
            began, used = time.perf_counter(), cpu_seconds()
            steps[name](*batch)
            pair = time.perf_counter() - began, cpu_seconds() - used
            if number > WARM:
                is_checked = name == "guarded" and number % every == 0
                found["checked" if is_checked else name].append(pair)
    everywhere = world.gather(found)
    if world.is_main:
        Path(path).write_text(json.dumps(everywhere))


def measure(row: int, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return the median seconds and CPU seconds of each kind of step."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "times.json"
        flags = ["-n", str(options.ranks), "--zero", str(row), "--device", "cpu"]
        words = [sys.executable, "-m", "shardwise", "run", *flags, __file__, "--work", str(path)]
        words += [f"--config={options.config}", f"--checks={options.checks}"]
        words += [f"--every={options.every}"]
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
        ranks = json.loads(path.read_text())
    medians = {}
    for kind in ranks[0]:
        # A step ends when its last rank ends, and uses the processors of all ranks.
        steps = list(zip(*(rank[kind] for rank in ranks), strict=True))
        seconds = statistics.median(max(wall for wall, _ in step) for step in steps)
        cpu = statistics.median(sum(used for _, used in step) for step in steps)
        medians[kind] = {"seconds": seconds, "cpu": cpu}
    return medians


def cost(medians: dict[str, dict[str, float]], key: str, every: int) -> float:
    """Return the cost of the guard relative to a run without it."""
    plain, guarded, checked = (medians[kind][key] for kind in ("plain", "guarded", "checked"))
    return (checked + (every - 1) * guarded) / (every * plain) - 1


def main() -> None:
    """Measure all rows."""
    flags = figure.parser(__doc__ or "")
    flags.add_argument("--config", default="C", choices=list(workloads.CONFIGURATIONS))
    flags.add_argument("--ranks", type=figure.positive, default=2)
    flags.add_argument("--rows", type=figure.numbers, default=[0, 3], help="values of --zero")
    flags.add_argument("--every", type=figure.positive, default=100, help="K")
    flags.add_argument("--checks", type=figure.positive, default=4, help="checked steps per row")
    flags.add_argument("--work", help=argparse.SUPPRESS)
    options = flags.parse_args()
    if options.work:
        work(options.work, options.config, options.checks, options.every)
        return
    facts = figure.begin()
    figure.show(workloads.CONFIGURATIONS[options.config].describe(), "")
    heads = ["--zero", "time", "step, ms", "guarded step, ms", "checked step, ms"]
    heads += [f"cost with K = {options.every}"]
    rows, results = [], []
    for row in options.rows:
        medians = measure(row, options)
        results.append({"row": row, **medians})
        for key, name in (("seconds", "wall"), ("cpu", "CPU")):
            each = [f"{medians[kind][key] * 1e3:.1f}" for kind in ("plain", "guarded", "checked")]
            rows.append([str(row), name, *each, f"{cost(medians, key, options.every):+.2%}"])
    figure.show(*figure.table(heads, rows))
    figure.keep(options, facts, every=options.every, ranks=options.ranks, results=results)


if __name__ == "__main__":
    main()
