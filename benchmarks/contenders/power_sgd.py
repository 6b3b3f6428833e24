"""torch DDP with its PowerSGD hook: each gradient as two matrices of a low rank, with feedback."""

from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from job import Job, Step


def build(job: Job, *, rank: int) -> Step:
    job.join_torch()
    model = DistributedDataParallel(job.plain_model(), gradient_as_bucket_view=True)
    # With error feedback 2 is the first step that may be compressed.
    state = PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook)
    optimizer = job.optimizer(model.parameters())

    return job.plain_step(model, optimizer)
