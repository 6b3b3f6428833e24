"""One rank of benchmarks/goodput.py: trains a small model in steps of even length, saves every so
many, and says when it starts and when it has made a step.
"""

import os
import time
from argparse import ArgumentParser
from pathlib import Path

import torch
from torch import nn

import shardwise as sw

parser = ArgumentParser()
parser.add_argument("folder", type=Path)
parser.add_argument("--steps", type=int, required=True)
parser.add_argument("--every", type=int, required=True)
parser.add_argument("--pause", type=float, required=True)
parser.add_argument("--ranks", type=int, required=True)
options = parser.parse_args()

world = sw.init(seed=0, device="cpu", quiet=True)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
engine = sw.Engine(model, torch.optim.AdamW(model.parameters()))
rows = torch.utils.data.TensorDataset(torch.ones(8, 64).repeat(options.steps, 1))
loader = sw.Loader(rows, batch_size=8)
engine.track(loader=loader)
print(f"ready {os.getpid()}", flush=True)
engine.resume(options.folder)
world.print(f"start {engine.steps}")
trains = False
for step in loader.steps():
    if not trains:
        trains = True
        print(f"trains {os.getpid()}", flush=True)
    for (x,) in step:
        engine.backward(model(x).square().mean())
        # Fewer ranks compute longer.
        time.sleep(options.pause * options.ranks / world.size)
    engine.step()
    world.print(f"step {engine.steps}")
    if engine.steps % options.every == 0 and engine.steps < options.steps:
        engine.save(options.folder, keep=2)
world.print("hash done")
