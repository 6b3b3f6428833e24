"""Train on a stream of samples, and resume in the middle of an epoch.

    shardwise run -n 2 examples/recipes/streaming.py

Run it twice: the second run continues where the first one stopped. Prints the samples seen.
"""

import argparse
from collections.abc import Iterator

import torch
from torch import nn
from torch.utils.data import IterableDataset

import shardwise as sw


class Lines(IterableDataset):
    """Yields the lines of a file as vectors of shape (32,), one after the other."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __iter__(self) -> Iterator[torch.Tensor]:
        with open(self.path) as file:
            for line in file:
                codes = torch.tensor([ord(c) % 128 for c in line.ljust(32)[:32]])
                yield codes / 128.0


world = sw.init(seed=0)
model = nn.Sequential(nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 32))
engine = sw.Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
loader = sw.Loader(Lines(argparse.__file__), batch_size=24)
engine.track(loader=loader)
engine.resume("stream-checkpoints")

first = engine.steps
for _ in loader.epochs(2):
    for x in loader:
        engine.backward((model(x) - x).square().mean())
        stats = engine.step()
        if engine.steps % 10 == 0:
            world.print(f"step {engine.steps}: loss {stats.loss:.5f}")
            engine.save("stream-checkpoints", keep=1)
        if engine.steps == first + 25:
            world.print(
                f"stops after step {engine.steps}; the next run continues from a checkpoint"
            )
            raise SystemExit
