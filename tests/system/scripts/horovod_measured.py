"""Trains in Horovod's style, and evaluates in between."""

import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import shardwise.horovod as hvd

hvd.init()
dataset = TensorDataset(torch.randn(24, 8), torch.randn(24, 1))
sampler = DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank())
loader = DataLoader(dataset, batch_size=4, sampler=sampler)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
for epoch in range(100):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    with torch.no_grad():
        for x, _ in loader:
            model(x)
