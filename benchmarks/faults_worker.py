"""One rank of benchmarks/faults.py: trains a small model with dropout, BatchNorm, a schedule and
shuffled data, saves often, in turn beside training and not, and prints a hash of what it came to.
"""

import hashlib
import time
from argparse import ArgumentParser
from pathlib import Path

import torch
from torch import nn

import shardwise as sw

parser = ArgumentParser()
parser.add_argument("folder", type=Path)
for name, kind in {"steps": int, "width": int, "pause": float}.items():
    parser.add_argument(f"--{name}", type=kind, required=True)
options = parser.parse_args()

world = sw.init(seed=0, device="cpu", quiet=True)
torch.set_num_threads(1)
model = nn.Sequential(
    nn.Linear(16, options.width),
    nn.BatchNorm1d(options.width),
    nn.Dropout(0.2),
    nn.Linear(options.width, options.width),
    nn.ReLU(),
    nn.Linear(options.width, 1),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.95)
engine = sw.Engine(model, optimizer)
rows = torch.randn(8 * options.steps // 2, 16, generator=torch.Generator().manual_seed(1))
loader = sw.Loader(list(rows), 8, shuffle=True)
engine.track(loader=loader, scheduler=scheduler)
engine.resume(options.folder)
world.print(f"start {engine.steps}")
for _ in loader.epochs(2):
    for x in loader:
        engine.backward(model(x).square().mean())
        engine.step()
        scheduler.step()
        world.print(f"step {engine.steps}")
        time.sleep(options.pause)
        if engine.steps % 2 == 0:
            engine.save(options.folder, keep=2, background=engine.steps % 4 == 0)

summed = hashlib.sha256()
with engine.full_parameters():
    for name, value in sorted(model.state_dict().items()):
        summed.update(name.encode() + value.numpy().tobytes())
for number, state in sorted(engine.optimizer_state_dict()["state"].items()):
    for name, value in sorted(state.items()):
        summed.update(f"{number} {name}".encode() + torch.as_tensor(value).numpy().tobytes())
summed.update(repr((scheduler.state_dict(), loader.state_dict())).encode())
world.print(f"hash {summed.hexdigest()[:16]}")
