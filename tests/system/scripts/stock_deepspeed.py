"""Trains a small network with DeepSpeed, correctly or with one mistake.

torchrun --nproc-per-node 2 stock_deepspeed.py STAGE MISTAKE
"""

import sys

import deepspeed
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

stage, mistake = int(sys.argv[-2]), sys.argv[-1]
# Building this kernel on a CPU takes minutes. Without it, DeepSpeed uses Gloo.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.init_distributed("gloo")
torch.manual_seed(0)
x = torch.randn(96, 8, generator=torch.Generator().manual_seed(1))
data = TensorDataset(x, x.prod(1, keepdim=True))
model: nn.Module = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
window = 2 if mistake == "summed_window_2" else 3
config = {
    "train_batch_size": 8 * window * dist.get_world_size(),
    "train_micro_batch_size_per_gpu": 8,
    "zero_optimization": {"stage": stage},
    "zero_allow_untested_optimizer": True,
    "gradient_clipping": 0.5,
}
if mistake == "constant_batch":
    config["train_batch_size"] = 48  # of the two ranks; one process has half as many
own = torch.optim.AdamW(model.parameters(), lr=0.01)
engine, *_ = deepspeed.initialize(model=model, optimizer=own, config=config)
sampler = None if mistake == "same_data" else DistributedSampler(data)
loader = DataLoader(data, batch_size=8, sampler=sampler)

for epoch in range(2):
    if sampler is not None:
        sampler.set_epoch(epoch)
    for a, b in loader:
        errors = (engine(a) - b).square()
        loss = errors[b > 0].mean() if mistake == "mean_of_means" else errors.mean()
        if mistake.startswith("summed"):
            loss = loss * dist.get_world_size()
        if mistake == "divided_twice":  # engine.backward divides by the window, too
            loss = loss / window
        engine.backward(loss)
        engine.step()
dist.destroy_process_group()
