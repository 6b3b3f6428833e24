"""Draws the rows of a batch on each worker separately."""

import torch

import shardwise as sw

world = sw.init(seed=0)
x = torch.randn(96, 8)
y = x.sin().sum(1, keepdim=True)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
engine = sw.Engine(model, torch.optim.AdamW(model.parameters(), lr=0.01))
for _ in range(8):
    rows = torch.randint(0, len(x), (12,))
    batch, targets = world.share((x[rows], y[rows]))
    engine.backward(torch.nn.functional.mse_loss(model(batch), targets))
    engine.step()
