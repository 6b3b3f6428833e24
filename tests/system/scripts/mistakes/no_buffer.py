"""Keeps a running mean in a plain tensor, which no worker shares with the others."""

import torch
from torch.utils.data import TensorDataset

import shardwise as sw

world = sw.init(seed=0)
x = torch.randn(96, 8)
dataset = TensorDataset(x, x.sin().sum(1, keepdim=True))


class Centred(torch.nn.Module):
    """Takes from its input the running mean of those before."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(8)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        centred = values - self.mean
        self.mean = 0.5 * self.mean + 0.5 * values.detach().mean(0)
        return centred


model = torch.nn.Sequential(
    Centred(), torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)
)
engine = sw.Engine(model, torch.optim.AdamW(model.parameters(), lr=0.01))
for batch, targets in sw.Loader(dataset, batch_size=12, shuffle=True):
    engine.backward(torch.nn.functional.mse_loss(model(batch), targets))
    engine.step()
