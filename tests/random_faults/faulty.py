"""Trains and saves, with a fault: python faulty.py FAULT.json MOMENT

It writes the time of the fault to the file MOMENT.
"""

import json
import os
import resource
import sys
import threading
import time
from pathlib import Path
from typing import Any

FAULT = json.loads(Path(sys.argv[1]).read_text())
SIGNALS = FAULT["signals"]
IS_VICTIM = int(os.environ["SHARDWISE_LAUNCH_RANK"]) == FAULT["victim"]


def strike() -> None:
    """Have the fault now."""
    Path(sys.argv[2]).write_text(repr(time.time()))
    kind = FAULT["kind"]
    if kind in SIGNALS:
        os.kill(os.getpid(), SIGNALS[kind])
        time.sleep(0.05)  # SIGSTOP takes effect with a delay
    elif kind == "exit at once":
        os._exit(0)
    elif kind == "exception":
        raise ValueError("the requested fault")
    elif kind == "memory":
        import torch

        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + 2**26
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        held = []
        while True:
            held.append(torch.ones(2**20))
    else:
        sys.exit(3 if kind == "exit(3)" else 0)


def at(place: str, step: int = 0) -> None:
    """Have the fault now, if this is its place and step."""
    if IS_VICTIM and place == FAULT["place"] and step in (0, FAULT["step"]):
        strike()


def soon(place: str, step: int) -> None:
    """Have the fault after its delay, if this is its place and step."""
    if IS_VICTIM and place == FAULT["place"] and step == FAULT["step"]:
        threading.Timer(FAULT["delay"], strike).start()


if FAULT["kind"] == "abort":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
at("before sw.init")

import torch  # noqa: E402

import shardwise as sw  # noqa: E402


class Faulty(torch.autograd.Function):
    """An identity function that may have the fault in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, step: int) -> torch.Tensor:
        ctx.step = step
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        at("backward", ctx.step)
        return grads[0], None


torch.set_num_threads(1)
world = sw.init(seed=0)
at("after sw.init")
layers = [torch.nn.Linear(64, 64) for _ in range(6)]
model = torch.nn.Sequential(*layers)
engine = sw.Engine(model, torch.optim.AdamW(model.parameters()), bucket_mb=0.02, quiet=True)
for number in range(1, FAULT["steps"] + 1):
    soon("any moment of a step", number)
    hidden = Faulty.apply(layers[0](torch.ones(8, 64)), number)
    at("forward", number)
    for layer in layers[1:]:
        hidden = layer(hidden)
    engine.backward(hidden.mean())
    at("before the step", number)
    engine.step()
    soon("any moment of a save", number)
    engine.save("checkpoints/", keep=2)
if IS_VICTIM and "moment" in FAULT["place"]:
    while True:  # the fault strikes while the other ranks wait for these collectives
        engine.backward(model(torch.ones(8, 64)).mean())
        engine.step()
world.barrier()
while True:
    engine.backward(model(torch.ones(8, 64)).mean())
    engine.step()
