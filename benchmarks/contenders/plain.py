"""One plain PyTorch process on the whole batch; on the CPU, of one thread, what the limit is taken
from."""

from job import Job, Step


def build(job: Job) -> Step:
    model = job.plain_model()
    optimizer = job.optimizer(model.parameters())

    return job.plain_step(model, optimizer)
