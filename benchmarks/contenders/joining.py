"""How the contenders of the bridges join their run, and shard a model by FSDP2."""

import os

from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from job import Job


def join(job: Job, under: str) -> None:
    """Join the run: that of Shardwise where it trains `under` the library, else torch's."""
    if under == "shardwise":
        import shardwise as sw
        from contenders.shardwise import identity
        from shardwise.net import environment

        os.environ |= environment.identity_variables(identity(job))
        sw.init(reseed=False, quiet=True, device=job.setting.device)
        return
    if not job.on_gpu:
        os.environ["ACCELERATE_USE_CPU"] = "true"
    if under == "ddp" and job.size == 1:
        return  # as a user starts one process: the libraries then train without DDP
    os.environ |= job.launched()
    job.join_torch()


def shard(job: Job, model: nn.Module) -> None:
    """Apply FSDP2 to `model`, one unit per block, as contenders/fsdp2.py does."""
    mesh = init_device_mesh(job.setting.device, (job.size,))
    for unit in [*job.blocks(model), model]:
        fully_shard(unit, mesh=mesh)
