"""torch DistributedDataParallel, gradients as views of its buckets (its faster setting)."""

from torch.nn.parallel import DistributedDataParallel

from job import Job, Step


def build(job: Job) -> Step:
    job.join_torch()
    model = DistributedDataParallel(
        job.plain_model(),
        device_ids=[job.device.index] if job.on_gpu else None,
        gradient_as_bucket_view=True,
    )
    optimizer = job.optimizer(model.parameters())

    return job.plain_step(model, optimizer)
