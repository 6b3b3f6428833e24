"""The auxiliary loss that balances experts is multiplied by the number of ranks.

It is computed from the counts of all ranks, and each rank adds it to its own loss, so averaging
gradients keeps it as it is. Seen in Megatron-LM#2237, #5047 and #5798.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

right = "--right" in sys.argv
dist.init_process_group("gloo")
size = dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(256, 8)
data = TensorDataset(x, x.prod(1, keepdim=True).sigmoid())


class Mixture(nn.Module):
    """Mixes 4 experts, each on every rank. Returns the output and the Switch auxiliary loss."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 4)
        self.experts = nn.ModuleList(nn.Linear(8, 1) for _ in range(4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gates = self.router(x).softmax(-1)
        counts = torch.bincount(gates.argmax(-1), minlength=4).to(x.dtype)
        dist.all_reduce(counts)
        y = sum(gates[:, e, None] * each(x).tanh() for e, each in enumerate(self.experts))
        return y, 4 * (counts / counts.sum() * gates.mean(0)).sum()


model = DistributedDataParallel(Mixture())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
sampler = DistributedSampler(data)
for epoch in range(4):
    sampler.set_epoch(epoch)
    for a, b in DataLoader(data, batch_size=16, sampler=sampler):
        y, auxiliary = model(a)
        error = nn.functional.mse_loss(y, b)
        weight = 0.01 if right else 0.01 * size
        optimizer.zero_grad()
        (error + weight * auxiliary).backward()
        optimizer.step()
        dist.all_reduce(error.detach_())
        if dist.get_rank() == 0:
            print(f"loss {error.item() / size:.5f}")
dist.destroy_process_group()
