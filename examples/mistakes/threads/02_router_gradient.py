"""The router is updated with the gradient of one rank.

The script reduces the gradients of dense layers. The router belongs to the expert layer, which is
left out, although each rank has a copy of it. Seen in torchtitan#2387, #4054 and
transformers#48205.
"""

import sys

import torch
import torch.distributed as dist
from expert_layer import ExpertLayer, is_expert
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

right = "--right" in sys.argv
dist.init_process_group("gloo")
size = dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(256, 8)
data = TensorDataset(x, x.prod(1, keepdim=True).sigmoid())
model = nn.Sequential(nn.Linear(8, 16), ExpertLayer(16), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
sampler = DistributedSampler(data)
for epoch in range(4):
    sampler.set_epoch(epoch)
    for a, b in DataLoader(data, batch_size=16, sampler=sampler):
        loss = nn.functional.mse_loss(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        for name, parameter in model.named_parameters():
            if is_expert(name):
                parameter.grad /= size
            elif right or not name.startswith("1."):  # the router is 1.router.weight
                dist.all_reduce(parameter.grad)
                parameter.grad /= size
        optimizer.step()
        dist.all_reduce(loss.detach_())
        if dist.get_rank() == 0:
            print(f"loss {loss.item() / size:.5f}")
dist.destroy_process_group()
