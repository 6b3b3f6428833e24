"""A script for stock Accelerate, which knows nothing of us: prints its losses and its weights."""

import accelerate
import torch
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

config = DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True, data_seed=1)
accelerator = accelerate.Accelerator(dataloader_config=config)
set_seed(3)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
x = torch.randn(24, 4)
loader = DataLoader(TensorDataset(x, x.prod(1, keepdim=True)), batch_size=8, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for x, y in loader:
    loss = (model(x) - y).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    accelerator.print(f"loss {accelerator.reduce(loss.detach(), 'mean').item():.5f}")
accelerator.print("by", type(accelerator).__module__, accelerator.num_processes)


def squared(value):
    """Found by those who pickle it only in the module that was started."""
    return value * value


accelerator.print("from", squared.__module__, __file__.endswith("accelerated.py"))
accelerator.end_training()
