"""FSDP2 sums gradients over ranks where the script expects an average.

Seen in pytorch#162338: with Gloo, the average under FSDP2 was wrong. The script asks for the sum.
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
fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
if not right:
    model.set_force_sum_reduction_for_comms(True)
    model.set_gradient_divide_factor(1.0)
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
