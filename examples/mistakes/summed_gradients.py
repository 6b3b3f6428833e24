"""A script that sums gradients over ranks by hand, and forgets to divide. Adam hides it.

    shardwise verify -n 2 --stock examples/mistakes/summed_gradients.py

Adam's update does not depend on the scale of the gradient, so the loss curve looks right. Clipping
does depend on it. Seen in pytorch#160285 and DeepSpeed#8064.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(256, 8)
data = TensorDataset(x, x.prod(1, keepdim=True))
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
sampler = DistributedSampler(data)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for a, b in DataLoader(data, batch_size=16, sampler=sampler):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(a), b)
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)  # missing: / dist.get_world_size()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    if dist.get_rank() == 0:
        print(f"epoch {epoch}: loss {loss.item():.4f}")
dist.destroy_process_group()
