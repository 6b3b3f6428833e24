"""Trains a configuration of step_time.py in a plain loop: what plan_time.py predicts and measures.

    shardwise run -n 2 benchmarks/plan_step.py C --steps 12 --out step.json

FILE gets the median seconds of a step, the first ones left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

import models
import shardwise as sw
import workloads

WARM = 3
"""Steps that are not counted."""


def main() -> None:
    """Train, and write the median."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=sorted(workloads.CONFIGURATIONS))
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    workload = workloads.CONFIGURATIONS[options.name]
    world = sw.init(seed=0)
    model = models.build(workload)
    optimizer = torch.optim.AdamW(model.parameters(), lr=workload.lr, fused=True)
    engine = sw.Engine(model, optimizer)
    ((x, y),) = models.batches(workload, 0, 1)[:1]
    loader = sw.Loader(TensorDataset(x, y), batch_size=workload.batch)
    seconds, begun = [], time.perf_counter()
    for _ in loader.epochs(WARM + options.steps):
        for inputs, targets in loader:
            engine.backward(models.loss_of(model, inputs, targets))
            engine.step()
        now = time.perf_counter()
        seconds.append(now - begun)
        begun = now
    if options.out and world.is_main:
        options.out.write_text(json.dumps(statistics.median(seconds[WARM:])))


if __name__ == "__main__":
    main()
