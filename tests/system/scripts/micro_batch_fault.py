"""A fault of micro-batches alone: the scheduler is stepped once for each."""

import torch
from torch.utils.data import TensorDataset

import shardwise as sw

sw.init(seed=0)
x = torch.randn(96, 8)
dataset = TensorDataset(x, x.sin().sum(1, keepdim=True))
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
engine = sw.Engine(model, optimizer)
for step in sw.Loader(dataset, batch_size=12, shuffle=True).steps():
    for batch, targets in step:
        engine.backward(torch.nn.functional.mse_loss(model(batch), targets))
        scheduler.step()
    engine.step()
