"""The CPU time of a step of a very small model: the engine on one worker, and a plain loop.

    python benchmarks/small_steps.py [--config tiny] [--rounds 20] [--steps 50]

Both train the same model with one thread in the same process, and take turns of --steps steps. The
figures are medians over the rounds. CPU time does not include the time in which other processes use
the core, but it increases if they use the same caches. So compare ratios, not milliseconds.
"""

import sys
import time
from collections.abc import Sequence
from statistics import median

import torch
from torch import Tensor

import figure
import models
import shardwise as sw
import workloads
from job import Step
from workloads import Workload


def main(arguments: Sequence[str] | None = None) -> int:
    """Train in turns, and print one table."""
    parser = figure.parser(__doc__)
    figure.add_numbers(parser, {"rounds": 20, "steps": 50})
    parser.add_argument("--config", choices=workloads.CONFIGURATIONS, default="tiny")
    options = parser.parse_args(arguments)
    facts = figure.begin()
    torch.set_num_threads(1)
    sw.init(seed=0, quiet=True)
    workload = workloads.CONFIGURATIONS[options.config]
    batches = models.batches(workload, 0, 1)
    steps = {"plain loop": _plain(workload), "Shardwise ZERO_0": _ours(workload)}
    milliseconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(options.rounds + 1):  # the first one warms up
        for name, step in steps.items():
            begun = time.process_time()
            for number in range(options.steps):
                step(*batches[number % len(batches)])
            milliseconds[name].append((time.process_time() - begun) / options.steps * 1e3)
    rows = []
    for name, values in milliseconds.items():
        pairs = zip(values[1:], milliseconds["plain loop"][1:], strict=True)
        ratio = median(ours / plain for ours, plain in pairs)
        rows.append([name, f"{median(values[1:]):.2f}", f"{ratio:.2f}"])
    head = [f"{options.config}, 1 worker", "ms of CPU time per step", "x plain loop"]
    figure.show(*figure.table(head, rows))
    figure.keep(options, facts, milliseconds=milliseconds)
    return 0


def _plain(workload: Workload) -> Step:
    model = models.build(workload)
    optimizer = torch.optim.AdamW(model.parameters(), lr=workload.lr, fused=True)

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = models.loss_of(model, inputs, targets)
        loss.backward()
        optimizer.step()
        return loss

    return step


def _ours(workload: Workload) -> Step:
    model = models.build(workload)
    optimizer = torch.optim.AdamW(model.parameters(), lr=workload.lr, fused=True)
    engine = sw.Engine(model, optimizer)

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        loss = models.loss_of(model, inputs, targets)
        engine.backward(loss, weight=len(inputs))
        engine.step()
        return loss

    return step


if __name__ == "__main__":
    sys.exit(main())
