"""A loss whose targets are fp32 also if the model is fp64: torch then returns it in fp32."""

import torch
from torch import nn

import shardwise as sw

world = sw.init(seed=0)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
engine = sw.Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
rows = torch.randn(32, 6, generator=torch.Generator().manual_seed(1))
for (x,) in sw.Loader(torch.utils.data.TensorDataset(rows), batch_size=8):
    engine.backward(nn.functional.binary_cross_entropy_with_logits(model(x), torch.ones(len(x), 1)))
    engine.step()
