"""Trains a workload in a plain loop: the script that `gpu_first.py` gives to `shardwise plan`.

shardwise plan --on 1xH100 --precision bf16-mixed benchmarks/gpu_loop.py gpt2-124m
"""

from __future__ import annotations

import json
import sys

import torch
from torch.utils.data import TensorDataset

import models
import shardwise as sw
import workloads


def main(name: str, steps: int = 3) -> None:
    """Train some steps; `name` is one of workloads.ON_A_DEVICE, or a workload as JSON."""
    workload = workloads.ON_A_DEVICE.get(name) or workloads.understood(json.loads(name))
    world = sw.init(seed=0)
    with world.device:
        model = models.build(workload)
    optimizer = torch.optim.AdamW(model.parameters(), lr=workload.lr, fused=True)
    engine = sw.Engine(model, optimizer)
    ((inputs, targets), *_) = models.batches(workload, 0, 1)
    loader = sw.Loader(TensorDataset(inputs, targets), batch_size=workload.batch)
    for _ in loader.epochs(steps):
        for x, y in loader:
            engine.backward(models.loss_of(model, x, y))
            engine.step()


if __name__ == "__main__":
    main(sys.argv[1])
