"""Rank 0 saves a moving average of the weights, and has averages of its own shards only.

The file has 1/N of each tensor. Outside of the forward, FSDP2 parameters are shards. No thread: the
mistake is easy to make where parameters are DTensors.
"""

import io
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

right = "--right" in sys.argv
dist.init_process_group("gloo")
size = dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(256, 8)
data = TensorDataset(x, x.prod(1, keepdim=True).sigmoid())
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
average: dict[str, torch.Tensor] = {}
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
sampler = DistributedSampler(data)
for epoch in range(4):
    sampler.set_epoch(epoch)
    for a, b in DataLoader(data, batch_size=16, sampler=sampler):
        loss = nn.functional.mse_loss(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for name, p in model.named_parameters():
            values = (p.full_tensor() if right else p.to_local()).detach()
            average.setdefault(name, values.clone()).lerp_(values, 0.1)
        dist.all_reduce(loss.detach_())
        if dist.get_rank() == 0:
            print(f"loss {loss.item() / size:.5f}")
    if dist.get_rank() == 0:
        torch.save(average, io.BytesIO())  # in place of a file
dist.destroy_process_group()
