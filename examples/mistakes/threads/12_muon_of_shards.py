"""Muon orthogonalises the shard of a gradient that each rank has, and not the whole matrix.

The update depends on the number of ranks. Seen in DeepSpeed#8437, Megatron-LM#5961 and Muon#45.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

right = "--right" in sys.argv
dist.init_process_group("gloo")
size = dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(256, 8)
data = TensorDataset(x, x.prod(1, keepdim=True).sigmoid())


class Muon(torch.optim.Optimizer):
    """Updates matrices by their gradient, orthogonalised by Newton-Schulz."""

    def __init__(self, parameters: object, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:
        for p in self.param_groups[0]["params"]:
            gradient = p.grad.full_tensor() if right else p.grad.to_local()
            update = gradient
            if p.ndim == 2:
                update = gradient / (gradient.norm() + 1e-7)
                for _ in range(5):
                    square = update @ update.T
                    update = 2 * update - 1.5 * square @ update + 0.5 * square @ square @ update
            if right:
                update = distribute_tensor(update, p.device_mesh, p.placements).to_local()
            p.to_local().sub_(self.param_groups[0]["lr"] * update)


model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
optimizer = Muon(model.parameters(), lr=0.02)
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
