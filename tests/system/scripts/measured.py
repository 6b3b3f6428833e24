"""Trains on random numbers, knowing nothing of being measured."""

import sys
import time

import torch

import shardwise as sw

world = sw.init(seed=0)
x = torch.randn(96, 16)  # before the engine exists: identical on all ranks
model = torch.nn.Linear(16, 4)
engine = sw.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1))
data = torch.utils.data.TensorDataset(x, x[:, :4])
loader = sw.Loader(data, batch_size=12, shuffle=True)
held_out = sw.Loader(data, batch_size=12)
metrics = sw.Metrics()
if "linger" in sys.argv:
    print("lingering", flush=True)
    time.sleep(60)
for _ in loader.epochs(3):
    for batch, targets in loader:
        engine.backward(torch.nn.functional.mse_loss(model(batch), targets))
        engine.step()
        if f"not-on-{world.size}" in sys.argv and engine.steps == 2:
            raise ValueError("that many will not do")
    with torch.no_grad():
        for batch, targets in held_out:
            metrics.add(accuracy=(model(batch) - targets).abs().lt(1).float().mean())
    metrics.compute()
