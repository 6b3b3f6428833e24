"""torch DDP with ZeroRedundancyOptimizer: optimizer state sharded by whole parameters."""

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from job import Job, Step


def build(job: Job) -> Step:
    job.join_torch()
    model = DistributedDataParallel(job.model(), gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(),
        torch.optim.AdamW,
        parameters_as_bucket_view=True,
        **job.hyperparameters,
    )

    return job.plain_step(model, optimizer)
