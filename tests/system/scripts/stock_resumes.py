"""Trains, saves every second step, and resumes by itself, with one mistake.

torchrun --nproc-per-node 2 stock_resumes.py MISTAKE
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

mistake = sys.argv[1]
dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())  # each rank draws its own dropout
data = TensorDataset(torch.randn(64, 4, generator=torch.Generator().manual_seed(1)))
model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 1)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=4, sampler=sampler)
checkpoint = Path(f"last-{dist.get_rank()}.pt")
done, random = 0, None
if checkpoint.exists() and mistake != "never":
    state = torch.load(checkpoint)
    model.load_state_dict(state["model"])
    if mistake != "optimizer":
        optimizer.load_state_dict(state["optimizer"])
    if mistake != "scheduler":
        scheduler.load_state_dict(state["scheduler"])
    if mistake != "random":
        random = state["random"]
    done = state["done"]

for epoch in range(done // len(loader), 2):
    sampler.set_epoch(epoch)
    for number, (x,) in enumerate(loader, epoch * len(loader)):
        if number < done and mistake != "samples":
            continue
        if random is not None:
            torch.set_rng_state(random)
            random = None
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        scheduler.step()
        if number % 2:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            state |= {"scheduler": scheduler.state_dict(), "random": torch.get_rng_state()}
            torch.save(state | {"done": number + 1}, checkpoint)
dist.destroy_process_group()
