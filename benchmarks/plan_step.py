"""Trains a workload in a plain loop: the script that plan_time.py and gpu_first.py give to
`shardwise plan`, and that plan_time.py measures.

    shardwise run -n 2 benchmarks/plan_step.py C --steps 12 --out step.json
    shardwise plan --on 1xH100 --precision bf16-mixed benchmarks/plan_step.py gpt2-124m
"""

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
    """Train, and write the median seconds of a step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload", help="the name of a configuration, or a workload as JSON")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    known = workloads.CONFIGURATIONS | workloads.ON_A_DEVICE
    workload = known.get(options.workload) or workloads.understood(json.loads(options.workload))
    world = sw.init(seed=0)
    with world.device:
        model = models.build(workload)
    optimizer = torch.optim.AdamW(model.parameters(), lr=workload.lr, fused=True)
    engine = sw.Engine(model, optimizer)
    ((x, y), *_) = models.batches(workload, 0, 1)
    loader = sw.Loader(TensorDataset(x, y), batch_size=workload.batch)
    seconds, begun = [], time.perf_counter()
    for _ in loader.epochs(WARM + options.steps):
        for inputs, targets in loader:
            engine.backward(models.loss_of(model, inputs, targets))
            engine.step()
        # The dataset is one batch: an epoch is a step, with the loader's work as users have it.
        now = time.perf_counter()
        seconds.append(now - begun)
        begun = now
    if options.out and world.is_main:
        options.out.write_text(json.dumps(statistics.median(seconds[WARM:])))


if __name__ == "__main__":
    main()
