"""The selection bias of the experts is updated again by the recomputation of activations.

The layer updates its bias at the start of its forward pass, by the counts of the pass before.
Activation checkpointing runs the forward pass again in the backward pass: it uses another bias than
the first time, and updates it twice per step.
"""

import sys

import torch
import torch.distributed as dist
from balanced_layer import BalancedLayer
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

right = "--right" in sys.argv
dist.init_process_group("gloo")
size = dist.get_world_size()


class Recomputed(BalancedLayer):
    """A layer that does not keep its activations."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not right:
            self.update_bias(sums=False)
        return super().forward(x)


class Block(nn.Module):
    """Runs the layer under activation checkpointing."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Recomputed(16, sums=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.layer, x, use_reentrant=False)


torch.manual_seed(0)
x = torch.randn(256, 8)
data = TensorDataset(x, x.prod(1, keepdim=True).sigmoid())
model = nn.Sequential(nn.Linear(8, 16), Block(), nn.Linear(16, 1))
wrapped = DistributedDataParallel(model, broadcast_buffers=False)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
sampler = DistributedSampler(data)
for epoch in range(4):
    sampler.set_epoch(epoch)
    for a, b in DataLoader(data, batch_size=16, sampler=sampler):
        loss = nn.functional.mse_loss(wrapped(a), b)
        optimizer.zero_grad()
        loss.backward()
        if right:  # counting twice does not change which experts have more tokens than the mean
            model[1].layer.update_bias(sums=False)
        optimizer.step()
        dist.all_reduce(loss.detach_())
        if dist.get_rank() == 0:
            print(f"loss {loss.item() / size:.5f}")
dist.destroy_process_group()
