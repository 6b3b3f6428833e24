"""A training that new processes import, so this imports little."""

import torch
from torch import nn

import shardwise as sw

STEPS = 4


def losses_of_training(steps=STEPS):
    """Train a small model, and return its losses and the name of the placement."""
    world = sw.init(seed=0, quiet=True)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    engine = sw.Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    data = torch.utils.data.TensorDataset(torch.randn(64, 8, dtype=torch.float64))
    losses = []
    for (x,) in sw.Loader(data, batch_size=16):
        engine.backward(model(x).pow(2).mean())
        losses.append(engine.step().loss)
    print(f"rank {world.rank} has trained", flush=True)
    return losses[:steps], engine.placement.name
