"""Makes steps at ZERO_2 and a save, and writes their walks: walk_step.py FOLDER."""

import os
import sys
from pathlib import Path
from typing import Any

import torch
from tests.system.walk_tracer import Walk
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import shardwise as sw

LARGE = 1_000
"""Elements that a tensor has if it holds a state, and not the few numbers of an exchange."""


class OnLargeTensors(TorchDispatchMode):
    """Notes the stack at every operation on a large tensor."""

    def __init__(self, walk: Walk) -> None:
        super().__init__()
        self.walk = walk

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = (x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor))
        if any(tensor.numel() >= LARGE for tensor in tensors):
            self.walk.note()
        return func(*args, **(kwargs or {}))


folder = Path(sys.argv[1])
world = sw.init(seed=0, zero=2)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
engine = sw.Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
step, save = Walk(), Walk()
# The first steps set up state and are not part of the walk. The others are several, because a rank
# sums where it notices that the other one has arrived, which may be in one of several places.
for number in range(13):
    loss = model(torch.randn(8, 64)).square().mean()
    if number < 3:
        engine.backward(loss)
        engine.step()
    else:
        with OnLargeTensors(step):
            engine.backward(loss)
            engine.step()


def noted(name: str) -> Any:
    real = getattr(os, name)

    def write(*args: Any, **kwargs: Any) -> Any:
        save.note()
        return real(*args, **kwargs)

    return write


for name in ("pwrite", "pwritev", "write", "rename", "replace"):
    setattr(os, name, noted(name))
engine.save(folder / "checkpoint")
step.write(folder / f"step.{world.rank}.walk")
save.write(folder / f"save.{world.rank}.walk")
