"""Trains a small network correctly, with one of several libraries.

torchrun --nproc-per-node 2 stock_libraries.py LIBRARY
"""

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

library = sys.argv[1]
accelerator: Any = None
if library in ("accelerate", "accelerate_fsdp2"):
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin

    plugin = None
    if library == "accelerate_fsdp2":
        wraps: dict[str, Any] = {"auto_wrap_policy": "size_based_wrap", "min_num_params": 10}
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, cpu_ram_efficient_loading=False, **wraps
        )
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, fsdp_plugin=plugin)
else:
    dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(96, 8, generator=torch.Generator().manual_seed(1))
data = TensorDataset(x, x.prod(1, keepdim=True))
model: nn.Module = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
if library in ("fsdp2", "fsdp2_bf16"):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    dtype = torch.bfloat16 if library == "fsdp2_bf16" else None
    policy = MixedPrecisionPolicy(param_dtype=dtype)
    fully_shard(model[2], mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
elif library in ("fsdp1", "fsdp1_flat"):
    device = torch.device("cpu")
    model = FullyShardedDataParallel(model, device_id=device, use_orig_params=library == "fsdp1")
elif library == "tensor":
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
elif library == "zero":
    model = DistributedDataParallel(model)
if library == "zero":
    optimizer: Any = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
else:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
own = accelerator is None and library != "tensor"
sampler = DistributedSampler(data) if own else None
loader: Any = DataLoader(data, batch_size=8, sampler=sampler)
if accelerator is not None:
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

for epoch in range(2):
    if sampler is not None:
        sampler.set_epoch(epoch)
    for a, b in loader:
        if accelerator is not None:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.mse_loss(model(a), b))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            continue
        nn.functional.mse_loss(model(a), b).backward()
        optimizer.step()
        optimizer.zero_grad()
if dist.is_initialized():
    dist.destroy_process_group()
