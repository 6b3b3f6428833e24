"""Weighs a mean over the labels that are not ignored by the rows of the batch."""

import torch
from torch.utils.data import TensorDataset

import shardwise as sw

world = sw.init(seed=0)
x, y = torch.randn(96, 8), torch.randint(0, 4, (96,))
y[::5] = -100
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
engine = sw.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1))
for batch, labels in sw.Loader(TensorDataset(x, y), batch_size=12, shuffle=True):
    loss = torch.nn.functional.cross_entropy(model(batch), labels)
    engine.backward(loss, weight=len(batch))
    engine.step()
