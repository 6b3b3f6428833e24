"""torch's PostLocalSGD: DDP whose hook leaves gradients with the rank, and the mean of parameters
every so many steps."""

import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel

from job import Job, Step


def build(job: Job, *, every: int) -> Step:
    job.join_torch()
    model = DistributedDataParallel(job.plain_model(), gradient_as_bucket_view=True)
    alone, _ = dist.new_subgroups(group_size=1)
    state = PostLocalSGDState(process_group=None, subgroup=alone, start_localSGD_iter=0)
    model.register_comm_hook(state, post_localSGD_hook)
    # It averages when its count of steps, which begins at 0, is a multiple of the period.
    averager = PeriodicModelAverager(period=every, warmup_steps=0)
    averager.step = 1
    optimizer = PostLocalSGDOptimizer(job.optimizer(model.parameters()), averager)

    return job.plain_step(model, optimizer)
