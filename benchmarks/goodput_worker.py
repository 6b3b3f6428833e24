"""One rank of benchmarks/goodput.py: trains a small model in steps of even length, saves every so
many, and says when it starts and when it has made a step.
"""

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
options = parser.parse_args()

world = sw.init(seed=0, device="cpu", quiet=True)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
engine = sw.Engine(model, torch.optim.AdamW(model.parameters()))
engine.resume(options.folder)
world.print(f"start {engine.steps}")
while engine.steps < options.steps:
    engine.backward(model(torch.ones(8, 64)).square().mean())
    engine.step()
    time.sleep(options.pause)
    world.print(f"step {engine.steps}")
    if engine.steps % options.every == 0 and engine.steps < options.steps:
        engine.save(options.folder, keep=2)
world.print("hash done")
