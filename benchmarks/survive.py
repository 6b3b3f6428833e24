"""The cost of --survive in a run that loses no worker.

    python benchmarks/survive.py [--rows 0,1,2,3] [--ranks 2,4] [--config mlp] [--width 1024]
    python benchmarks/survive.py --config C --rows 2 --ranks 4 --rounds 5

A training runs with and without `--survive 1`, alternately. The table shows the median over the
rounds of a step's time and of its CPU time, which is summed over all workers. The changes are
medians of the ratios within a round. CPU times depend little on other processes of the machine. The
last two columns are the CPU time, in percent of a step's without `--survive`, of sending gradients
to the second copies, and of updating these copies.

The model `mlp` is an MLP of 4 layers; others are the configurations of step_time.py. All train in
fp32 with AdamW.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import figure
import machine
import workloads

WARM = 5
"""Steps that are not counted."""

BATCH = 64


def rows_of(config: str, width: int, steps: int) -> tuple[Any, Any, Any]:
    """Return a model, a dataset of `steps` batches, and a function of model and rows: the loss."""
    import torch
    from torch import nn

    if config == "mlp":
        layers = [layer for _ in range(4) for layer in (nn.Linear(width, width), nn.ReLU())]
        rows = torch.randn(BATCH, width).repeat(steps, 1)
        dataset = torch.utils.data.TensorDataset(rows)
        return nn.Sequential(*layers), dataset, lambda model, x: model(x).square().mean()
    import models

    workload = workloads.CONFIGURATIONS[config]
    [(inputs, targets), *_] = models.batches(workload, 0, 1)
    dataset = torch.utils.data.TensorDataset(inputs.repeat(steps, 1), targets.repeat(steps, 1))
    return models.build(workload), dataset, models.loss_of


def timed(owner: type, name: str) -> list[float]:
    """Make calls of `owner.name` append their CPU time to the list that is returned."""
    call, used = getattr(owner, name), []

    @functools.wraps(call)
    def wrapped(*given: Any) -> None:
        began = time.thread_time()
        call(*given)
        used.append(time.thread_time() - began)

    setattr(owner, name, wrapped)
    return used


def work(path: str, options: argparse.Namespace) -> None:
    """Train, and write the times of this worker."""
    import torch

    import shardwise as sw
    from shardwise.states.second_copies import SecondCopies

    torch.set_num_threads(1)
    world = sw.init(seed=0)
    steps = options.steps
    model, dataset, loss_of = rows_of(options.config, options.width, WARM + steps)
    sends, updates = timed(SecondCopies, "receive"), timed(SecondCopies, "update")
    engine = sw.Engine(model, torch.optim.AdamW(model.parameters()), quiet=True)
    loader = sw.Loader(dataset, batch_size=len(dataset) // (WARM + steps))
    times, used = [], []
    for step in loader.steps():
        began = time.perf_counter()
        for rows in step:
            engine.backward(loss_of(model, *rows))
        engine.step()
        times.append(time.perf_counter() - began)
        used.append(machine.cpu_seconds())
    cpu = (used[-1] - used[WARM - 1]) / steps
    counted = updates[len(updates) * WARM // (WARM + steps) :]  # several calls per step
    here = [cpu, sum(sends[WARM:]) / steps, sum(counted) / steps]
    everywhere = world.gather(here)
    if world.is_main:
        cpu, sent, updated = (sum(column) for column in zip(*everywhere, strict=True))
        seconds = statistics.median(times[WARM:])
        found = {"seconds": seconds, "cpu": cpu, "sent": sent, "updated": updated}
        Path(path).write_text(json.dumps(found))


def measure(
    row: int, ranks: int, *, survives: bool, options: argparse.Namespace
) -> dict[str, float]:
    """Run the training once."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "times.json"
        flags = ["-n", str(ranks), "--zero", str(row), "--device", "cpu"]
        flags += ["--survive", "1"] if survives else []
        words = [sys.executable, "-m", "shardwise", "run", *flags, __file__, "--work", str(path)]
        words += ["--width", str(options.width), "--steps", str(options.steps)]
        words += ["--config", options.config]
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
        found: dict[str, float] = json.loads(path.read_text())
        return found


def main() -> None:
    """Measure all rows and numbers of workers."""
    flags = figure.parser(__doc__ or "")
    flags.add_argument("--rows", default="0,1,2,3", help="values of --zero")
    flags.add_argument("--config", default="mlp", choices=["mlp", *workloads.CONFIGURATIONS])
    flags.add_argument("--ranks", default="2,4")
    flags.add_argument("--width", type=int, default=1024)
    flags.add_argument("--rounds", type=int, default=3)
    flags.add_argument("--steps", type=int, default=30)
    flags.add_argument("--work", help=argparse.SUPPRESS)
    options = flags.parse_args()
    if options.work:
        work(options.work, options)
        return
    about = machine.describe()
    print("\n".join(f"{name}: {value}" for name, value in about.items()))
    head = ["--zero", "workers", "step, ms", "with --survive", "CPU, ms", "with --survive"]
    print(f"\n| {' | '.join([*head, 'sends', 'updates'])} |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|")
    figures = []
    for row in map(int, figure.words(options.rows)):
        for ranks in map(int, figure.words(options.ranks)):
            found: dict[bool, list[dict[str, float]]] = {False: [], True: []}
            for _ in range(options.rounds):
                for survives in found:
                    found[survives].append(measure(row, ranks, survives=survives, options=options))
            cells = []
            for key in ("seconds", "cpu"):
                pairs = [
                    (without[key], with_it[key])
                    for without, with_it in zip(found[False], found[True], strict=True)
                ]
                without, with_it = (statistics.median(each) for each in zip(*pairs, strict=True))
                change = statistics.median(after / before for before, after in pairs) - 1
                cells += [f"{without * 1e3:.2f}", f"{with_it * 1e3:.2f} ({change:+.1%})"]
            for key in ("sent", "updated"):
                cells.append(f"{statistics.median(x[key] for x in found[True]) / without:.1%}")
            print(f"| {row} | {ranks} | {' | '.join(cells)} |", flush=True)
            named = {"without": found[False], "with": found[True]}
            figures.append({"row": row, "ranks": ranks, **named})
    if options.json:
        options.json.write_text(json.dumps({"about": about, "figures": figures}, indent=1))


if __name__ == "__main__":
    main()
