"""The norm for clipping leaves out the experts, so gradients are clipped too little.

Seen in Megatron-LM#5916, #6080 and trl#5713.
"""

import sys

import torch
import torch.distributed as dist
from expert_layer import ExpertLayer, is_expert
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

right = "--right" in sys.argv
dist.init_process_group("gloo")
size = dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(256, 8)
data = TensorDataset(x, x.prod(1, keepdim=True).sigmoid())
model = nn.Sequential(nn.Linear(8, 16), ExpertLayer(16), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
sampler = DistributedSampler(data)
for epoch in range(4):
    sampler.set_epoch(epoch)
    for a, b in DataLoader(data, batch_size=16, sampler=sampler):
        loss = nn.functional.mse_loss(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        for name, parameter in model.named_parameters():
            if not is_expert(name):
                dist.all_reduce(parameter.grad)
            parameter.grad /= size
        named = dict(model.named_parameters())
        squares = (
            nn.utils.get_total_norm([p.grad for n, p in named.items() if not is_expert(n)]) ** 2
        )
        if right:
            own = nn.utils.get_total_norm([p.grad for n, p in named.items() if is_expert(n)]) ** 2
            dist.all_reduce(own)
            squares += own
        nn.utils.clip_grads_with_norm_(named.values(), 0.05, squares.sqrt())
        optimizer.step()
        dist.all_reduce(loss.detach_())
        if dist.get_rank() == 0:
            print(f"loss {loss.item() / size:.5f}")
dist.destroy_process_group()
