"""Trains in fp64 while ranks are killed at chosen moments, and stores the losses and the weights.

    survives.py steps|plain sgd|adamw OUT [RANK:MOMENT:STEP ...]

A rank is named by its number at the start of the run. MOMENT is one of `moments`.
"""

import os
import signal
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import nn

import shardwise as sw
from shardwise.comm import SurvivorGroup
from shardwise.comm.socket_mesh import SocketMesh
from shardwise.states.gradients.gradients import Gradients

loop, kind, out, *kills = sys.argv[1:]
world = sw.init(seed=3, precision="fp64")
number, process = world.rank, os.getpid()
planned = [kill.split(":") for kill in kills]
mine = {(moment, int(at)) for rank, moment, at in planned if int(rank) == number}
torch.set_default_dtype(torch.float64)
drawn = torch.Generator().manual_seed(5)
rows = torch.randn(50, 6, generator=drawn)
labels = torch.randint(0, 3, (50,), generator=drawn)
torch.manual_seed(4)
model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3))
model[1].eval()
if kind == "sgd":
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
else:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.7)
engine = sw.Engine(model, optimizer)
engine.track(scheduler=scheduler)
dataset = torch.utils.data.TensorDataset(rows, labels, torch.arange(50))
loader = sw.Loader(dataset, batch_size=8, shuffle=True)


def reach(moment: str) -> None:
    """Kill this process if it is to be killed at this moment."""
    if (moment, engine.steps) in mine:
        os.kill(process, signal.SIGKILL)


def around(owner: Any, name: str, before: str = "", after: str = "") -> None:
    """Make `owner.name` reach a moment before and after it runs."""
    call: Callable[..., Any] = getattr(owner, name)

    @wraps(call)
    def wrapped(*given: Any, **named: Any) -> Any:
        reach(before)
        found = call(*given, **named)
        reach(after)
        return found

    setattr(owner, name, wrapped)


is_confirming = False


def halfway(owner: Any, name: str) -> None:
    """Kill this process after the first of the messages that confirm a step."""
    call: Callable[..., Any] = getattr(owner, name)

    @wraps(call)
    def wrapped(*given: Any, **named: Any) -> Any:
        found = call(*given, **named)
        if is_confirming:
            reach("halfway")
        return found

    setattr(owner, name, wrapped)


def confirm(
    self: SurvivorGroup, call: Callable[[SurvivorGroup], None] = SurvivorGroup.barrier
) -> None:
    """Confirm a step."""
    global is_confirming
    reach("confirm")
    is_confirming = True
    call(self)
    is_confirming = False
    reach("update")


if mine:
    around(Gradients, "reduce", before="reduce", after="exchange")
    SurvivorGroup.barrier = confirm  # type: ignore[method-assign]
    halfway(SocketMesh, "send")
    halfway(torch.distributed, "isend")

losses: list[float] = []
used: list[int] = []


def train(x: torch.Tensor, y: torch.Tensor) -> None:
    """Run a forward and a backward pass."""
    reach("forward")
    scores = model(x)
    if ("backward", engine.steps) in mine:
        scores.register_hook(lambda grad: reach("backward"))
    engine.backward(nn.functional.cross_entropy(scores, y))


for _ in loader.epochs(2):
    if loop == "steps":
        for step in loader.steps():
            for x, y, index in step:
                train(x, y)
                taken = index.tolist()
            losses.append(engine.step(max_norm=1.0).loss)
            used += taken
            scheduler.step()
    else:
        for x, y, index in loader:
            train(x, y)
            stats = engine.step(max_norm=1.0)
            if not stats.repeated:
                losses.append(stats.loss)
                used += index.tolist()
            scheduler.step()

assert os.getpid() == process
with torch.no_grad():
    seen = sum(len(index) for _, _, index in loader)
assert world.sum(torch.tensor(seen)).item() == 50
engine.save("checkpoints")
weights = torch.cat([each.detach().flatten() for each in model.parameters()])
torch.save({"losses": losses, "weights": weights, "used": used}, f"{out}-{number}.pt")
print(f"rank {number} is {world.rank} of {world.size} after step {engine.steps}")
