"""Trains on two islands, one per host, and prints the bytes that this host sent over LINK.

The first rank of each host prints a line of JSON: the bytes sent in the steps between two
boundaries, and those at the second boundary as a multiple of the formula's value for WIRE.

The ranks meet in the folder MEETING before and after each count. Otherwise one could wait for the
others at a boundary, and after a second ask them over the link whether they are in it too.
"""

import json
import os
import time
from pathlib import Path

import torch
from torch import nn

import shardwise as sw

WIDTH, BLOCKS, EVERY = 512, 8, 4
NUMEL = BLOCKS * (WIDTH * WIDTH + WIDTH)
BYTES = {"fp32": 4.0, "int4": 0.5 + 4 / 256}
SETTLED = 1.0
"""Seconds without a byte after which every delayed acknowledgement has gone out."""


def meet(place: str) -> None:
    """Wait until all ranks are at `place`, without a byte over the link."""
    folder = Path(os.environ["MEETING"])
    (folder / f"{place} {world.rank}").touch()
    while len(list(folder.glob(f"{place} *"))) < world.size:
        time.sleep(0.01)


def sent(place: str) -> int:
    """Bytes that have left this host since its start, once all are here and no more follow."""
    meet(f"before {place}")
    before, now = -1, counted()
    while now != before:
        time.sleep(SETTLED)
        before, now = now, counted()
    meet(f"after {place}")
    return now


def counted() -> int:
    """Return the interface's counter of sent bytes."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    line = next(line for line in lines if line.strip().startswith(f"{os.environ['LINK']}:"))
    return int(line.partition(":")[2].split()[8])


def train(steps: int) -> None:
    """Take `steps` steps."""
    for _ in range(steps):
        engine.backward(model(torch.randn(4, WIDTH)).square().mean())
        engine.step(max_norm=1.0)


torch.set_num_threads(1)
world = sw.init(seed=0, islands=2, quiet=True)
blocks = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(BLOCKS))
model = nn.Sequential(*blocks)
wire = os.environ["WIRE"]
engine = sw.Engine(
    model, torch.optim.AdamW(model.parameters()), zero=2, equal_every=EVERY, wire=wire
)
train(EVERY)
first = sent("first")
train(EVERY - 1)
second = sent("second")
train(1)
third = sent("third")
if world.local_rank == 0:
    formula = BYTES[wire] * NUMEL
    print(json.dumps({"between": second - first, "boundary": (third - second) / formula}))
