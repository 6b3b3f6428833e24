"""Trains briefly with each ZeRO stage, and prints the bytes sent over the interface LINK.

The first rank of each host prints a line of JSON: the transport, and by stage the bytes sent in a
step as a multiple of the model's size in bytes.
"""

import json
import os
from pathlib import Path

import torch
from torch import nn

import shardwise as sw

WIDTH, BLOCKS, STEPS = 512, 8, 3
BYTES = BLOCKS * (WIDTH * WIDTH + WIDTH) * 4


def sent() -> int:
    """Bytes that have left this host since its start; no rank sends while they are read."""
    world.barrier()
    lines = Path("/proc/net/dev").read_text().splitlines()
    world.barrier()
    line = next(line for line in lines if line.strip().startswith(f"{os.environ['LINK']}:"))
    return int(line.partition(":")[2].split()[8])


def sent_in_a_step(row: int) -> float:
    """As a multiple of the model's bytes."""
    blocks = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(BLOCKS))
    model = nn.Sequential(*blocks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    engine = sw.Engine(model, optimizer, zero=row, bucket_mb=2, quiet=True)
    before = 0
    for step in range(STEPS + 1):
        if step == 1:  # the first step agrees on things that later steps reuse
            before = sent()
        engine.backward(model(torch.randn(4, WIDTH)).square().mean())
        engine.step()
    each = (sent() - before) / STEPS
    engine.close()
    return each / BYTES


torch.set_num_threads(1)
world = sw.init(seed=0)
rows = {row: sent_in_a_step(row) for row in map(int, os.environ.get("ROWS", "0 2 3").split())}
if world.local_rank == 0:
    print(json.dumps({"transport": world.collectives.name, "rows": rows}))
