"""A mean over rows that is averaged over the workers, as a script for DDP has it."""

import torch
from torch.utils.data import TensorDataset

import shardwise as sw

world = sw.init(seed=0)
x, y = torch.randn(96, 8), torch.randint(0, 4, (96,))
model = torch.nn.Linear(8, 4)
engine = sw.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1))
for batch, labels in sw.Loader(TensorDataset(x, y), batch_size=12, shuffle=True):
    engine.backward(torch.nn.functional.cross_entropy(model(batch), labels), reduction="ddp")
    engine.step()
