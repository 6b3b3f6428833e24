"""Resumes from the newest checkpoint in a folder, and prints a hash of the final state.

The hash depends on schedule, data and dropout too: nothing may differ after a fault.
"""

import argparse
import hashlib
import os
import signal
import time
from pathlib import Path

import torch
from torch import nn

import shardwise as sw

parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path)
parser.add_argument("--epochs", type=int, default=3, help="of 5 steps")
parser.add_argument("--every", type=int, default=4)
parser.add_argument("--width", type=int, default=16)
parser.add_argument("--background", action="store_true")
parser.add_argument("--pause", type=float, default=0.0)
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--die", type=int, default=None, help="rank 1 dies once after this step")
parser.add_argument("--signal", type=int, default=signal.SIGKILL, help="of what it dies")
args = parser.parse_args()

world = sw.init(seed=0, device="cpu", quiet=True)
torch.set_num_threads(1)
model = nn.Sequential(
    nn.Linear(8, args.width), nn.BatchNorm1d(args.width), nn.Dropout(0.2), nn.Linear(args.width, 1)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
engine = sw.Engine(model, optimizer)
rows = torch.randn(40, 8, generator=torch.Generator().manual_seed(1))
loader = sw.Loader(list(rows), 8, shuffle=True, num_workers=args.workers)
engine.track(loader=loader, scheduler=scheduler)
engine.resume(args.folder)
world.print(f"start {engine.steps}", flush=True)


def dies() -> bool:
    if engine.steps != args.die or world.rank != 1:
        return False
    mark = args.folder / "died"
    died = mark.exists()
    mark.touch()
    return not died


for _ in loader.epochs(args.epochs):
    for x in loader:
        if dies():
            os.kill(os.getpid(), args.signal)
        engine.backward(model(x).square().mean())
        engine.step()
        scheduler.step()
        world.print(f"step {engine.steps}", flush=True)
        time.sleep(args.pause)
        if engine.steps % args.every == 0:
            engine.save(args.folder, keep=2, background=args.background)

summed = hashlib.sha256()
with engine.full_parameters():
    for name, value in sorted(model.state_dict().items()):
        summed.update(name.encode() + value.numpy().tobytes())
summed.update(repr(scheduler.state_dict()).encode())
summed.update(repr(loader.state_dict()).encode())
world.print(f"hash {summed.hexdigest()[:16]} after {engine.steps}", flush=True)
