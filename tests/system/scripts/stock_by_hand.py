"""Trains with DistributedDataParallel on batches that no DataLoader makes.

torchrun --nproc-per-node 2 stock_by_hand.py KIND [ROWS]
"""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

kind = sys.argv[1]
rows = int(sys.argv[2]) if len(sys.argv) > 2 else 8
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
checkpoint = Path("last.pt")
first = nn.Linear(4, 1)
if checkpoint.exists():
    first.load_state_dict(torch.load(checkpoint))
if kind == "unseeded":
    torch.seed()
    nn.init.normal_(first.weight)
model = DistributedDataParallel(first)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
data = torch.randn(200, 4, generator=torch.Generator().manual_seed(1))
own = torch.Generator().manual_seed(rank)


def batch(step: int) -> torch.Tensor:
    """Return this rank's rows of a step."""
    if kind == "counted":  # as many rows as the command line says
        start = (step * size + rank) * rows
        return data[start : start + rows]
    if kind == "drawn":
        return torch.randn(rows, 4, generator=own)
    if kind == "same":
        return data[step * rows : (step + 1) * rows]
    return data[step * 16 : (step + 1) * 16][rank::size]


for step in range(6):
    if kind == "hangs" and step == 2 and rank == 1:
        time.sleep(1000)
    x = batch(step)

    def closure(x: torch.Tensor = x) -> torch.Tensor:
        """Compute the gradients inside of the step."""
        optimizer.zero_grad()
        loss: torch.Tensor = model(x).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    if rank == 0:
        torch.save(first.state_dict(), checkpoint)
dist.destroy_process_group()
