"""Starts two ranks itself, and trains with DistributedDataParallel on parts of the data.

python stock_spawns.py
"""

import os
import socket

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def train(rank: int, world_size: int, port: int) -> None:
    """Train on one rank."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(48, 4, generator=torch.Generator().manual_seed(1)))
    sampler = DistributedSampler(data, num_replicas=world_size, rank=rank)
    # The worker inherits the environment of its rank.
    options = {"num_workers": 1, "persistent_workers": True, "multiprocessing_context": "fork"}
    for (x,) in DataLoader(data, batch_size=8, sampler=sampler, **options):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        free = listener.getsockname()[1]
    torch.multiprocessing.spawn(train, args=(2, free), nprocs=2)
