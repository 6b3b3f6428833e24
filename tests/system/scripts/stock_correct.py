"""Trains correctly, with a trait that a mistake may be taken for.

torchrun --nproc-per-node 2 stock_correct.py TRAIT
"""

import copy
import io
import sys

import numpy
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import linear, mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

trait = sys.argv[1]
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(96, 8, generator=torch.Generator().manual_seed(1))
data = TensorDataset(x, x.prod(1, keepdim=True).sigmoid())


def computed_in_fp32(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """Return the output of a layer, by casts that nothing undoes."""
    narrow = torch.from_numpy(numpy.zeros(1, numpy.float32))
    values = (each.type_as(narrow) for each in (x, layer.weight, layer.bias))
    return linear(*values).to(x.dtype)


class Model(nn.Module):
    """An embedding of the signs of the inputs, two layers that start alike, and an output."""

    def __init__(self) -> None:
        super().__init__()
        self.signs, self.first = nn.Embedding(2, 16), nn.Linear(8, 16)
        self.second = nn.Linear(16, 16)
        self.third = copy.deepcopy(self.second) if trait == "copied_layers" else nn.Linear(16, 16)
        self.last = nn.Linear(16, 2)
        if trait == "tied":
            self.last.weight = self.signs.weight
        self.drop = nn.Dropout(0.2 if trait == "dropout" else 0.0)
        self.extra = nn.Linear(16, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x).tanh() + self.signs((x[:, 0] > 0).long())
        second = self.second(hidden)
        if trait == "fp32_layer":
            second = computed_in_fp32(self.second, hidden)
        output = self.last(self.drop(self.third(second.tanh()).tanh()))
        rows = x[:, :1] > 1.3
        if trait == "unused" and rows.any():
            output = output + self.extra(hidden) * rows
        return output.sum(1, keepdim=True)


plain = Model()
# Without it the third layer would be unused, which DistributedDataParallel has to be told.
by_hand = trait in ("own_reduction", "context", "unused")
options = {"static_graph" if trait == "static_graph" else "find_unused_parameters": True}
model = plain if by_hand else DistributedDataParallel(plain, **options)
if trait == "dropout":
    torch.manual_seed(1 + rank)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
if trait == "closure":
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
average = torch.optim.swa_utils.AveragedModel(plain) if trait == "average" else None
scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
sampler = None if trait == "context" else DistributedSampler(data)
loader = DataLoader(data, batch_size=8, sampler=sampler)
if trait == "own_part":
    part = torch.utils.data.Subset(data, range(rank, len(data), size))
    loader = DataLoader(part, batch_size=8, shuffle=True)
held = TensorDataset(*data[:13])
own_rows = range(13) if trait == "full_evaluation" else range(rank, 13, size)
evaluation = DataLoader(held, batch_size=13, sampler=own_rows)
window = 3 if trait == "accumulation" else 1

for epoch in range(2):
    if sampler is not None:
        sampler.set_epoch(epoch)
    for number, (a, b) in enumerate(loader, 1):
        if trait == "context":
            a, b = a.chunk(size)[rank], b.chunk(size)[rank]
        if trait == "closure":

            def closure(a: torch.Tensor = a, b: torch.Tensor = b) -> torch.Tensor:
                optimizer.zero_grad()
                loss = mse_loss(model(a), b)
                loss.backward()
                return loss

            optimizer.step(closure)
            continue
        loss = mse_loss(model(a), b) / window
        (scaler.scale(loss) if trait == "scaler" else loss).backward()
        if number % window:
            continue
        for p in model.parameters() if by_hand else ():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            dist.all_reduce(p.grad)
            p.grad /= size
        if trait == "scaler":
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
        else:
            if trait == "two_clips":
                nn.utils.clip_grad_norm_(plain.first.parameters(), 0.1)
                nn.utils.clip_grad_norm_(plain.second.parameters(), 0.1)
            optimizer.step()
        optimizer.zero_grad()
        if average is not None:
            average.update_parameters(plain)
    with torch.no_grad():
        sums = torch.zeros(2)
        for a, b in evaluation:
            sums += torch.tensor([mse_loss(plain(a), b, reduction="sum").item(), len(a)])
    if trait != "full_evaluation":
        dist.all_reduce(sums)
    if rank == 0:
        print(f"epoch {epoch}: {(sums[0] / sums[1]).item():.6f} over {sums[1].item():g} rows")
if average is not None and rank == 0:
    torch.save(average.module.state_dict(), io.BytesIO())
dist.destroy_process_group()
