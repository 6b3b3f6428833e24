"""Train, with the fault that is named after step 2: rank 0 saves alone, or something of rank 1."""

import os
import signal
import sys

import torch

import shardwise as sw


def strike(fault: str) -> None:
    """Have the fault."""
    if fault == "save" and world.is_main:
        engine.save("checkpoints/")
    elif fault == "stop" and world.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "loop" and world.rank == 1:
        while True:
            pass
    elif fault == "kill" and world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "differ" and world.rank == 1:
        world.sum(torch.ones(7))
    elif fault == "show" and world.rank == 1:
        os.kill(os.getpid(), signal.SIGUSR2)


torch.set_num_threads(1)
world = sw.init(seed=0)
model = torch.nn.Linear(4, 4)
engine = sw.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1))
for step in range(3):
    engine.backward(model(torch.ones(2, 4)).sum())
    engine.step()
    if step == 1:
        world.print("training")
        strike(sys.argv[1])
