"""Trains with torch's own collectives, and makes one mistake.

torchrun --nproc-per-node 2 stock_causes.py MISTAKE
"""

import io
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

mistake = sys.argv[1]
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(96, 8, generator=torch.Generator().manual_seed(1))
data = TensorDataset(x, x.prod(1, keepdim=True).sigmoid())
dtype = torch.bfloat16 if mistake == "bf16_accumulation" else None


class Counting(nn.Module):
    """Keeps the mean of its inputs in a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.lerp_(x.detach().mean(0), 0.1)
        return x


class Model(nn.Module):
    """Two layers, and a third one that some rows use only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 32), nn.Linear(32, 1)
        self.middle: nn.Module = nn.Identity()
        if mistake == "batch_norm":
            self.middle = nn.BatchNorm1d(32)
        elif mistake == "buffers":
            self.middle = Counting()
        elif mistake == "dropout_alike":
            self.middle = nn.Dropout(0.2)
        self.extra = nn.Linear(32, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.middle(self.first(x)).tanh()
        rows = x[:, :1] > (1.3 if mistake == "unused" else -100)
        output = self.last(hidden)
        return output + self.extra(hidden) * rows if rows.any() else output


plain = Model().to(dtype)
by_hand = mistake in ("unused", "wrong_group", "context_loss", "buffers", "small_error")
model: nn.Module = plain
if mistake in ("saved_shard", "shard_norm"):
    fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
elif not by_hand:
    model = DistributedDataParallel(plain, static_graph=mistake == "static_graph")
halves = [dist.new_group([first, first + 1]) for first in range(0, size, 2)] if size > 2 else [None]
rate = 0.1 * (1 + rank) if mistake == "other_rates" else 0.1
if mistake == "sums":
    rate = 0.002  # gradients of sums are larger
optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
sampler = None if mistake == "context_loss" else DistributedSampler(data)
loader = DataLoader(data, batch_size=8, sampler=sampler)
if mistake == "own_shuffles":
    shuffled = torch.Generator().manual_seed(rank)
    loader = DataLoader(data, batch_size=8, shuffle=True, generator=shuffled)
held = TensorDataset(*data[:13])
# 13 rows: padded to 7 + 7, or 7 + 6.
if mistake == "padded_evaluation":
    evaluation = DataLoader(held, batch_size=7, sampler=DistributedSampler(held, shuffle=False))
else:
    evaluation = DataLoader(held, batch_size=7, sampler=range(rank, 13, size))
window = 3 if mistake == "bf16_accumulation" else 1

for epoch in range(2):
    if sampler is not None:
        sampler.set_epoch(epoch)
    for number, (a, b) in enumerate(loader, 1):
        a, b = a.to(dtype), b.to(dtype)
        if mistake == "context_loss":
            a, b = a.chunk(size)[rank], b.chunk(size)[rank]
        loss = mse_loss(model(a), b, reduction="sum" if mistake == "sums" else "mean") / window
        if mistake == "clip_before_unscale":
            scaler.scale(loss).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            continue
        if mistake == "static_graph":
            # Without static_graph, DistributedDataParallel refuses a second backward pass.
            (loss * 0.25).backward(retain_graph=True)
            loss = loss * 0.75
        loss.backward()
        if number % window:
            continue
        for p in model.parameters() if by_hand else ():
            gradient = torch.zeros_like(p) if p.grad is None else p.grad
            group = halves[rank // 2] if mistake == "wrong_group" else None
            dist.all_reduce(gradient, group=group)
            if mistake != "context_loss":
                gradient /= dist.get_world_size(group)
            if mistake == "small_error" and size > 1:
                gradient *= 1 + 1e-6
        if mistake == "shard_norm":
            shards = [p.grad.to_local() for p in model.parameters()]
            norm = torch.stack([shard.norm() for shard in shards]).norm()
            for shard in shards:
                shard.mul_((0.1 / norm).clamp(max=1.0))
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        means = [mse_loss(model(a.to(dtype)), b.to(dtype)) for a, b in evaluation]
    if mistake == "unweighted_metric":
        mean = torch.stack(means).mean()
        dist.all_reduce(mean)
        if rank == 0:
            print(f"epoch {epoch}: {mean.item() / size:.6f}")
if mistake == "saved_shard" and rank == 0:
    torch.save(model.state_dict(), io.BytesIO())
dist.destroy_process_group()
