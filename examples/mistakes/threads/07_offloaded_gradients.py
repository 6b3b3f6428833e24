"""Gradients that are moved to the host after each micro-batch keep those of the first one only.

The update uses a quarter of the batch, and the loss falls as it should. Seen in DeepSpeed#7967.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

right = "--right" in sys.argv
WINDOW = 4
dist.init_process_group("gloo")
size = dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(512, 8)
data = TensorDataset(x, x.prod(1, keepdim=True).sigmoid())
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
sampler = DistributedSampler(data)
host: dict[nn.Parameter, torch.Tensor] = {}
total = torch.zeros(())
for epoch in range(4):
    sampler.set_epoch(epoch)
    for number, (a, b) in enumerate(DataLoader(data, batch_size=4, sampler=sampler), 1):
        loss = nn.functional.mse_loss(model(a), b) / WINDOW
        loss.backward()
        total = total + loss.detach()
        for parameter in model.parameters():
            gradient, parameter.grad = parameter.grad, None
            if parameter not in host:
                host[parameter] = gradient.cpu()
            elif right:
                host[parameter] += gradient.cpu()
        if number % WINDOW:
            continue
        for parameter, gradient in host.items():
            dist.all_reduce(gradient)
            parameter.grad = gradient / size
        optimizer.step()
        optimizer.zero_grad()
        host.clear()
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(f"loss {total.item() / size:.5f}")
        total = torch.zeros(())
dist.destroy_process_group()
