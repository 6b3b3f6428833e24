"""Draws noise and time steps for the samples of a batch on each worker separately."""

import torch

import shardwise as sw

world = sw.init(seed=0)
data = torch.utils.data.TensorDataset(torch.randn(96, 8))
model = torch.nn.Sequential(torch.nn.Linear(9, 16), torch.nn.Tanh(), torch.nn.Linear(16, 8))
engine = sw.Engine(model, torch.optim.AdamW(model.parameters(), lr=0.01))
for (x,) in sw.Loader(data, batch_size=12, shuffle=True):
    times = torch.randint(0, 4, (len(x), 1))
    noise = torch.randn_like(x)
    shift = torch.rand(len(x), 8, dtype=x.dtype)
    noisy = x + 0.1 * times * (noise + shift)
    loss = torch.nn.functional.mse_loss(model(torch.cat((noisy, times), 1)), noise)
    engine.backward(loss)
    engine.step()
