"""torch FSDP2, one unit per block; parameters freed after forward, or kept until backward."""

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from job import Job, Step


def build(job: Job, *, reshard: bool) -> Step:
    job.join_torch()
    mesh = init_device_mesh("cpu", (job.size,))
    model = job.model()
    for unit in [*job.blocks(model), model]:
        fully_shard(unit, mesh=mesh, reshard_after_forward=reshard)
    optimizer = job.optimizer(model.parameters())

    return job.plain_step(model, optimizer)
