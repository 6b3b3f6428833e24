"""The selection bias of the experts is updated after each micro-batch, not once per step.

The bias must change once per optimizer step, by the tokens of all its micro-batches. Here it
changes after every backward pass. The micro-batches of a step are then routed differently, and the
bias takes larger steps with more accumulation. prime-rl#2267 corrects a loop that cleared the
counts in every micro-batch.
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
    for number, (a, b) in enumerate(DataLoader(data, batch_size=8, sampler=sampler), start=1):
        loss = nn.functional.mse_loss(wrapped(a), b)
        (loss / 4).backward()
        is_last = number % 4 == 0
        if is_last or not right:
            layer.update_bias()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
        dist.all_reduce(loss.detach_())
        if dist.get_rank() == 0:
            print(f"loss {loss.item() / size:.5f}")
dist.destroy_process_group()
