"""A checkpoint has the tied weight twice, and loading it makes two parameters.

The embedding and the output layer share a weight. `assign=True` gives each the tensor under its own
name, and from then on each has its own gradient. torchtitan#3764, #1903 and transformers#38870 lost
the tie in converted checkpoints.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

right = "--right" in sys.argv
dist.init_process_group("gloo")
size = dist.get_world_size()
torch.manual_seed(0)
texts = torch.randint(0, 20, (256, 17)).sort(1).values
model = nn.Sequential(nn.Embedding(20, 16), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 20))
model[3].weight = model[0].weight
checkpoint = {name: values.clone() for name, values in model.state_dict().items()}
model.load_state_dict(checkpoint, assign=True)
if right:
    model[3].weight = model[0].weight
model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
sampler = DistributedSampler(texts)
for epoch in range(4):
    sampler.set_epoch(epoch)
    for tokens in DataLoader(texts, batch_size=16, sampler=sampler):
        loss = cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        dist.all_reduce(loss.detach_())
        if dist.get_rank() == 0:
            print(f"loss {loss.item() / size:.5f}")
dist.destroy_process_group()
