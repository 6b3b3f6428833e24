"""Rank 1 passes its engine an invalid ZeRO stage while the other ranks wait for it."""

import torch
from torch import nn

import shardwise as sw

world = sw.init(seed=0, device="cpu")
model = nn.Linear(2, 1)
zero = 9 if world.rank == 1 else 0
engine = sw.Engine(model, torch.optim.SGD(model.parameters()), zero=zero)
