"""Trains a workload in a plain loop: the script that plan_time.py and gpu_first.py give to
`shardwise plan`.

    shardwise plan --on 1xH100 --precision bf16-mixed benchmarks/plan_step.py gpt2-124m
"""

import json
import sys

import torch
from torch.utils.data import TensorDataset

import models
import shardwise as sw
import workloads


def main(name: str, steps: int = 3) -> None:
    """Train some steps; `name` is a configuration's, or a workload as JSON."""
    known = workloads.CONFIGURATIONS | workloads.ON_A_DEVICE
    workload = known.get(name) or workloads.understood(json.loads(name))
    world = sw.init(seed=0)
    with world.device:
        model = models.build(workload)
    optimizer = torch.optim.AdamW(model.parameters(), lr=workload.lr, fused=True)
    engine = sw.Engine(model, optimizer)
    ((inputs, targets), *_) = models.batches(workload, 0, 1)
    # One batch is the whole dataset: an epoch is a step.
    loader = sw.Loader(TensorDataset(inputs, targets), batch_size=workload.batch)
    for _ in loader.epochs(steps):
        for x, y in loader:
            engine.backward(models.loss_of(model, x, y))
            engine.step()


if __name__ == "__main__":
    main(sys.argv[1])
