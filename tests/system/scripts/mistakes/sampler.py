"""Keeps a DistributedSampler in addition to the engine's division of the batch."""

import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import shardwise as sw

world = sw.init(seed=0)
x = torch.randn(96, 8)
dataset = TensorDataset(x, x.sin().sum(1, keepdim=True))
sampler = DistributedSampler(dataset, num_replicas=world.size, rank=world.rank, shuffle=False)
loader = DataLoader(dataset, batch_size=12, sampler=sampler)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
engine = sw.Engine(model, torch.optim.AdamW(model.parameters(), lr=0.01))
for batch, targets in loader:
    engine.backward(torch.nn.functional.mse_loss(model(batch), targets))
    engine.step()
