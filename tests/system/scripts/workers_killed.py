"""Kill a rank, or a worker of its DataLoader, while workers send tensors through sockets.

workers_killed.py rank|worker
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

import shardwise as sw


class Endless(Dataset[torch.Tensor]):
    """Items that take a moment."""

    def __len__(self) -> int:
        return 10**6

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.01)
        return torch.tensor(index)


if __name__ == "__main__":
    world = sw.init()
    batches = iter(DataLoader(Endless(), num_workers=2))
    sockets: list[Path] = []
    while len(sockets) < 2 * world.size:  # the workers of all ranks send tensors
        next(batches)
        sockets = list(Path(os.environ["TMPDIR"]).rglob("listener-*"))
    print("reading")
    if world.rank == 1:
        killed = os.getpid() if sys.argv[1] == "rank" else batches._workers[0].pid
        os.kill(killed, signal.SIGKILL)
    for _ in batches:
        pass
