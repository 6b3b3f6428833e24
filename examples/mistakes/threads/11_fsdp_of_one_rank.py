"""FSDP over groups of one rank trains every rank on its own.

Seen in pytorch#154888 and verl#4710, where fsdp_size=1 trained without any reduction.
"""

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
shape = (1, size) if right else (size, 1)
mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
fully_shard(model, mesh=mesh["shard"])  # with 1 rank in "shard" nothing is reduced
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
sampler = DistributedSampler(data)
for epoch in range(4):
    sampler.set_epoch(epoch)
    for a, b in DataLoader(data, batch_size=16, sampler=sampler):
        loss = nn.functional.mse_loss(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        dist.all_reduce(loss.detach_())
        if dist.get_rank() == 0:
            print(f"loss {loss.item() / size:.5f}")
dist.destroy_process_group()
