"""The selection bias of the experts counts tokens of evaluations.

The layer counts tokens in each forward pass, and an evaluation runs between steps. Its tokens
change the next update of the bias, so the training depends on how often it is evaluated. Seen in
torchtitan#4148.
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
x = torch.randn(320, 8)
y = x.prod(1, keepdim=True).sigmoid()
data, held_out = TensorDataset(x[:256], y[:256]), (x[256:], y[256:])
layer = BalancedLayer(16, counts_always=not right)
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
        layer.update_bias()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            held_out_loss = nn.functional.mse_loss(model(held_out[0]), held_out[1])
        model.train()
        dist.all_reduce(loss.detach_())
        if dist.get_rank() == 0:
            print(f"loss {loss.item() / size:.5f}, held out {held_out_loss.item():.5f}")
dist.destroy_process_group()
