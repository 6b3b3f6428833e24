"""Sums gradients over the workers by hand, after the engine has done so."""

import torch
from torch.utils.data import TensorDataset

import shardwise as sw

world = sw.init(seed=0)
x = torch.randn(96, 8)
dataset = TensorDataset(x, x.sin().sum(1, keepdim=True))
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
engine = sw.Engine(model, torch.optim.SGD(model.parameters(), lr=0.05))
for batch, targets in sw.Loader(dataset, batch_size=12, shuffle=True):
    engine.backward(torch.nn.functional.mse_loss(model(batch), targets))
    with engine.full_gradients():
        for parameter in model.parameters():
            parameter.grad.copy_(world.sum(parameter.grad))
    engine.step()
