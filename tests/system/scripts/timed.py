"""Trains STEPS steps, or for ever; rank 1 sleeps SECONDS after each.   timed.py STEPS SECONDS"""

import sys
import time

import torch

import shardwise as sw

STEPS, SECONDS = int(sys.argv[1]), float(sys.argv[2])
WIDTH = 64

world = sw.init(seed=0)
model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(3)))
data = torch.utils.data.TensorDataset(torch.randn(64, WIDTH))  # before the engine: identical
engine = sw.Engine(model, torch.optim.SGD(model.parameters(), lr=0.01))
loader = sw.Loader(data, batch_size=16)
while engine.steps < STEPS or STEPS == 0:
    for (x,) in loader:
        engine.backward(model(x).square().mean())
        engine.step()
        if world.rank == 1:
            time.sleep(SECONDS)
    if engine.steps == 40:
        world.print("trained")
