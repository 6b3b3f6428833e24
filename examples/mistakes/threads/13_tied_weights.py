"""FSDP2 makes two parameters of one tied weight.

The embedding and the output layer share a weight. Each is sharded as a unit of its own, and from
then on each has its own gradient. Seen in torchtitan#3764, #1903 and transformers#38870.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler

right = "--right" in sys.argv
dist.init_process_group("gloo")
size = dist.get_world_size()
torch.manual_seed(0)
texts = torch.randint(0, 20, (256, 17)).sort(1).values
model = nn.Sequential(nn.Embedding(20, 16), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 20))
model[3].weight = model[0].weight
mesh = init_device_mesh("cpu", (size,))
if not right:
    fully_shard(model[0], mesh=mesh)
    fully_shard(model[3], mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
sampler = DistributedSampler(texts)
for epoch in range(4):
    sampler.set_epoch(epoch)
    for tokens in DataLoader(texts, batch_size=16, sampler=sampler):
        loss = cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        dist.all_reduce(loss.detach_())
        if dist.get_rank() == 0:
            print(f"loss {loss.item() / size:.5f}")
dist.destroy_process_group()
