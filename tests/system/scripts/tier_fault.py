"""A fault of one tier alone: the learning rate is another one where optimizer state is not on the
device."""

import torch
from torch.utils.data import TensorDataset

import shardwise as sw

sw.init(seed=0)
x = torch.randn(96, 8)
dataset = TensorDataset(x, x.sin().sum(1, keepdim=True))
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
engine = sw.Engine(model, optimizer)
if engine.placement.tier("optimizer").kind != "device":
    optimizer.param_groups[0]["lr"] *= 3
for step in sw.Loader(dataset, batch_size=12, shuffle=True).steps():
    for batch, targets in step:
        engine.backward(torch.nn.functional.mse_loss(model(batch), targets))
    engine.step()
