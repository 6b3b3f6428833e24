"""torch FSDP2, one unit per block; parameters freed after forward, or kept until backward."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

import models
from job import Job, Step


def build(job: Job, *, reshard: bool, offload: bool = False, own_cast: bool = False) -> Step:
    """With `offload` parameters, gradients and optimizer state are in the host's pinned memory,
    where they are updated. In bf16 the sharded parameters and the sums are fp32, as ours are.
    `own_cast` replaces autocast in bf16-mixed by FSDP2's own cast of what it gathers, its faster
    setting."""
    job.join_torch()
    mesh = init_device_mesh(job.setting.device, (job.size,))
    model = job.model()
    job.compile(model)
    policy = MixedPrecisionPolicy()
    own_cast = own_cast and job.setting.precision == "bf16-mixed"
    if job.setting.precision == "bf16" or own_cast:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        _halve_buffers(model)
    where = CPUOffloadPolicy() if offload else OffloadPolicy()
    for unit in [*job.blocks(model), model]:
        fully_shard(
            unit,
            mesh=mesh,
            reshard_after_forward=reshard,
            mp_policy=policy,
            offload_policy=where,
        )
    optimizer = job.optimizer(model.parameters())
    return job.plain_step(model, optimizer, loss_of=models.loss_of if own_cast else None)


def _halve_buffers(model: nn.Module) -> None:
    """Running statistics in bf16: it leaves buffers as they are, and torch's BatchNorm takes none
    whose dtype is not that of its weights."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point():
                setattr(module, name, buffer.to(torch.bfloat16))
