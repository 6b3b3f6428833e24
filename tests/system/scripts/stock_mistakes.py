"""Trains with DistributedDataParallel, and makes one mistake.

torchrun --nproc-per-node 2 mistakes.py MISTAKE
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

mistake = sys.argv[1]
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank if mistake in ("initial_values",) else 0)
generator = torch.Generator().manual_seed(0)
x = torch.randn(96, 8, generator=generator)
y = x.prod(1, keepdim=True).sigmoid()
data = TensorDataset(x, y)


class Model(nn.Module):
    """A small network, with BatchNorm or dropout where the mistake needs them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 32), nn.Linear(32, 1)
        self.norm = nn.BatchNorm1d(32) if mistake == "batch_norm" else nn.Identity()
        self.drop = nn.Dropout(0.2 if mistake == "dropout" else 0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.drop(self.norm(self.first(x)).tanh()))


plain = Model()
if mistake == "frozen" and rank == 1:
    plain.first.bias.requires_grad_(False)
by_hand = mistake in ("summed", "twice", "unreduced", "initial_values", "frozen")
model = plain if by_hand or mistake == "module" else DistributedDataParallel(plain)
sampler = DistributedSampler(data)
if mistake == "same_data":
    loader = DataLoader(data, batch_size=8)
else:
    loader = DataLoader(data, batch_size=8, sampler=sampler)
rate = 0.1 * size if mistake == "rate" else 0.1
optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
window = 4 if mistake in ("undivided", "divided_twice", "short_window") else 1


def loss_fn(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean over all outputs, or over the positive ones for some mistakes."""
    if mistake == "mean_of_means":
        kept = targets > 0.5
        return (outputs - targets)[kept].square().mean()
    return mse_loss(outputs, targets)


for epoch in range(2):
    if mistake != "set_epoch":
        sampler.set_epoch(epoch)
    for number, (a, b) in enumerate(loader, 1):
        loss = loss_fn(model(a), b)
        if mistake in ("divided_twice",):
            loss = loss / window / window
        elif mistake != "undivided":
            loss = loss / window
        loss.backward()
        if number % window and number != len(loader):
            continue
        if by_hand:
            for p in model.parameters():
                if p.grad is not None and mistake not in ("unreduced", "initial_values", "frozen"):
                    dist.all_reduce(p.grad)
                    p.grad /= {"twice": size * size}.get(mistake, 1)
        if mistake == "local_norm":
            nn.utils.clip_grad_norm_(list(model.parameters())[rank::size], 0.1)
        optimizer.step()
        optimizer.zero_grad()
        for _ in range(size if mistake == "scheduler" else 1):
            scheduler.step()
    with torch.no_grad():
        wrong = sum(mse_loss(model(a), b, reduction="sum").item() for a, b in loader)
    if rank == 0:
        print(f"epoch {epoch}: {wrong:.4f}")
dist.destroy_process_group()
