"""The selection bias of the experts follows the tokens of one rank.

Each rank updates the bias by its own counts, so the ranks send equal tokens to different experts.
Seen in torchtitan#4154, where the counts were not summed over tensor parallel ranks.
"""

import sys

import torch
import torch.distributed as dist
from balanced_layer import BalancedLayer
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

right = "--right" in sys.argv
dist.init_process_group("gloo")
size = dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(256, 8)
data = TensorDataset(x, x.prod(1, keepdim=True).sigmoid())
layer = BalancedLayer(16)
model = nn.Sequential(nn.Linear(8, 16), layer, nn.Linear(16, 1))
wrapped = DistributedDataParallel(model, broadcast_buffers=False)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
sampler = DistributedSampler(data)
for epoch in range(4):
    sampler.set_epoch(epoch)
    for a, b in DataLoader(data, batch_size=16, sampler=sampler):
        loss = nn.functional.mse_loss(wrapped(a), b)
        optimizer.zero_grad()
        loss.backward()
        layer.update_bias(sums=right)
        optimizer.step()
        dist.all_reduce(loss.detach_())
        if dist.get_rank() == 0:
            print(f"loss {loss.item() / size:.5f}")
dist.destroy_process_group()
