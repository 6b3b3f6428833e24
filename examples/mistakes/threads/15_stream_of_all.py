"""Every rank reads the whole stream, so all ranks train on the same samples.

An IterableDataset has no sampler. Each rank has to skip what the others read. Seen in datasets#6594
and nanoVLM#203.
"""

import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

right = "--right" in sys.argv
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(512, 8)


class Stream(IterableDataset):
    """Yields samples one by one, in the order of a file."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for row in x[rank::size] if right else x:
            yield row, row.prod().sigmoid()[None]


model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for _ in range(4):
    for a, b in DataLoader(Stream(), batch_size=16):
        loss = nn.functional.mse_loss(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        dist.all_reduce(loss.detach_())
        if rank == 0:
            print(f"loss {loss.item() / size:.5f}")
dist.destroy_process_group()
