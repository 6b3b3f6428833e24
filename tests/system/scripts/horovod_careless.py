"""A Horovod script that leaves steps out: none of them, or those that are named."""

import sys

import torch
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import shardwise.horovod as hvd

left_out = set(sys.argv[1:])
torch.set_num_threads(1)
hvd.init()
torch.manual_seed(hvd.rank())
model = torch.nn.Linear(4, 1)
rate = 0.1 if "scale" in left_out else 0.1 * hvd.size()
optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
if "broadcast" not in left_out:
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
if "wrap" not in left_out:
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
data = TensorDataset(torch.arange(64.0).view(16, 4))
sampler = None if "shard" in left_out else DistributedSampler(data)
for (x,) in DataLoader(data, batch_size=4, sampler=sampler, shuffle=sampler is None):
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()
if hvd.rank() == 0 or "save" in left_out:
    torch.save(model.state_dict(), "model.pt")
hvd.barrier()
