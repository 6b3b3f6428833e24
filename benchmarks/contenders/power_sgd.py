"""torch DDP with its PowerSGD hook: each gradient as two matrices of a low rank, with feedback."""

from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from job import Job, Step

ONE_BUCKET = 10_000
"""MB, more than the gradients have."""


def build(job: Job, *, rank: int) -> Step:
    job.join_torch()
    # In one bucket: the hook's collectives of several would be called in the order in which those
    # before them end, which over Gloo is not the same on all ranks.
    model = DistributedDataParallel(
        job.plain_model(), gradient_as_bucket_view=True, bucket_cap_mb=ONE_BUCKET
    )
    # With error feedback 2 is the first step that may be compressed.
    state = PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook)
    optimizer = job.optimizer(model.parameters())

    return job.plain_step(model, optimizer)
