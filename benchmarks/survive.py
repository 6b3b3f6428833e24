"""The cost of --survive in a run that loses no worker.

    python benchmarks/survive.py [--rows 0,1,2] [--ranks 2,4] [--width 1024] [--rounds 3]

A training runs with and without `--survive 1`, alternately. The table shows the fastest round's
median time of a step, and the CPU time of a step summed over all workers, which does not depend on
other processes of the machine. The model is an MLP of 4 layers in fp32 with AdamW.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import figure
import machine

WARM = 5
"""Steps that are not counted."""

BATCH = 64


def work(path: str, width: int, steps: int) -> None:
    """Train, and write the times of this worker."""
    import torch
    from torch import nn

    import shardwise as sw

    torch.set_num_threads(1)
    world = sw.init(seed=0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(width, width), nn.ReLU())]
    model = nn.Sequential(*layers)
    engine = sw.Engine(model, torch.optim.AdamW(model.parameters()), quiet=True)
    rows = torch.randn(BATCH, width).repeat(WARM + steps, 1)
    loader = sw.Loader(torch.utils.data.TensorDataset(rows), batch_size=BATCH)
    times, used = [], []
    for step in loader.steps():
        began = time.perf_counter()
        for (x,) in step:
            engine.backward(model(x).square().mean())
        engine.step()
        times.append(time.perf_counter() - began)
        usage = resource.getrusage(resource.RUSAGE_SELF)
        used.append(usage.ru_utime + usage.ru_stime)
    cpu = (used[-1] - used[WARM - 1]) / steps
    everywhere = world.gather(cpu)
    if world.is_main:
        found = {"seconds": statistics.median(times[WARM:]), "cpu": sum(everywhere)}
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
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
        found: dict[str, float] = json.loads(path.read_text())
        return found


def main() -> None:
    """Measure all rows and numbers of workers."""
    flags = figure.parser(__doc__ or "")
    flags.add_argument("--rows", default="0,1,2", help="values of --zero")
    flags.add_argument("--ranks", default="2,4")
    flags.add_argument("--width", type=int, default=1024)
    flags.add_argument("--rounds", type=int, default=3)
    flags.add_argument("--steps", type=int, default=30)
    flags.add_argument("--work", help=argparse.SUPPRESS)
    options = flags.parse_args()
    if options.work:
        work(options.work, options.width, options.steps)
        return
    about = machine.describe()
    print("\n".join(f"{name}: {value}" for name, value in about.items()))
    print("\n| --zero | workers | step, ms | with --survive | CPU, ms | with --survive |")
    print("|---|--:|--:|--:|--:|--:|")
    figures = []
    for row in map(int, figure.words(options.rows)):
        for ranks in map(int, figure.words(options.ranks)):
            found: dict[bool, list[dict[str, float]]] = {False: [], True: []}
            for _ in range(options.rounds):
                for survives in found:
                    found[survives].append(measure(row, ranks, survives=survives, options=options))
            cells = []
            for key in ("seconds", "cpu"):
                without, with_it = (
                    min(each[key] for each in found[survives]) for survives in (False, True)
                )
                change = f"{with_it / without - 1:+.1%}"
                cells += [f"{without * 1e3:.2f}", f"{with_it * 1e3:.2f} ({change})"]
            print(f"| {row} | {ranks} | {' | '.join(cells)} |", flush=True)
            named = {"without": found[False], "with": found[True]}
            figures.append({"row": row, "ranks": ranks, **named})
    if options.json:
        options.json.write_text(json.dumps({"about": about, "figures": figures}, indent=1))


if __name__ == "__main__":
    main()
