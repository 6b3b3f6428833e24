"""Uses an operation whose result differs in each run of the script."""

import torch
from torch.utils.data import TensorDataset

import shardwise as sw

world = sw.init(seed=0)
x = torch.randn(96, 8)
dataset = TensorDataset(x, x.sin().sum(1, keepdim=True))
noise = torch.Generator()
noise.seed()


class Noisy(torch.nn.Module):
    """Adds random values from a generator that the system seeds."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values + 0.01 * torch.randn(values.shape[1], generator=noise)


model = torch.nn.Sequential(torch.nn.Linear(8, 16), Noisy(), torch.nn.Linear(16, 1))
engine = sw.Engine(model, torch.optim.AdamW(model.parameters(), lr=0.01))
for batch, targets in sw.Loader(dataset, batch_size=12, shuffle=True):
    engine.backward(torch.nn.functional.mse_loss(model(batch), targets))
    engine.step()
