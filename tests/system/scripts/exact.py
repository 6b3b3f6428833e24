"""Trains, in the exact mode if possible, and prints the threads and a hash of the weights."""

import hashlib

import torch
from torch import nn
from torch.utils.data import TensorDataset

import shardwise as sw

world = sw.init(seed=0, quiet=True, device="cpu")
model = nn.Sequential(nn.Linear(512, 512), nn.BatchNorm1d(512), nn.GELU(), nn.Linear(512, 8))
engine = sw.Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
x = torch.randn(84, 512, generator=torch.Generator().manual_seed(1))
loader = sw.Loader(TensorDataset(x, x[:, :8].sin()), 32, shuffle=True)
for step in loader.steps():
    for inputs, targets in step:
        engine.backward(nn.functional.mse_loss(model(inputs), targets))
    engine.step(max_norm=1.0)
with engine.full_parameters():
    values = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
world.print(f"threads {torch.get_num_threads()}, {hashlib.sha256(values).hexdigest()}")
