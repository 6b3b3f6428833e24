"""Masks values at random in a collate_fn, once per micro-batch."""

import torch

import shardwise as sw


def collate(rows):
    x = torch.stack(rows)
    return x.masked_fill(torch.rand(x.shape) < 0.3, 0), x


world = sw.init(seed=0)
data = list(torch.randn(96, 8))
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 8))
engine = sw.Engine(model, torch.optim.AdamW(model.parameters(), lr=0.01))
for masked, x in sw.Loader(data, batch_size=12, shuffle=True, collate_fn=collate):
    engine.backward(torch.nn.functional.mse_loss(model(masked), x))
    engine.step()
