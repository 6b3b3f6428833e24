"""Scales the outputs on the first worker only."""

import torch
from torch.utils.data import TensorDataset

import shardwise as sw

world = sw.init(seed=0)
x = torch.randn(96, 8)
dataset = TensorDataset(x, x.sin().sum(1, keepdim=True))
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
engine = sw.Engine(model, torch.optim.AdamW(model.parameters(), lr=0.01))
for batch, targets in sw.Loader(dataset, batch_size=12, shuffle=True):
    outputs = model(batch)
    if world.rank == 0:
        outputs = 1.1 * outputs
    engine.backward(torch.nn.functional.mse_loss(outputs, targets))
    engine.step()
