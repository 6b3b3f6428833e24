"""Draws folds of cross-validation again after training has begun."""

import torch
from torch.utils.data import DataLoader, TensorDataset, random_split

import shardwise as sw

world = sw.init(seed=0)
x = torch.randn(60, 8)
dataset = TensorDataset(x, x.sin().sum(1, keepdim=True))
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
engine = sw.Engine(model, torch.optim.AdamW(model.parameters(), lr=0.01))
for _ in range(4):
    train, _ = random_split(dataset, [24, 36])
    for batch in DataLoader(train, batch_size=12):
        inputs, targets = world.share(batch)
        engine.backward(torch.nn.functional.mse_loss(model(inputs), targets))
        engine.step()
