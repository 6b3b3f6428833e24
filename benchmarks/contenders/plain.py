"""One plain PyTorch process on the whole batch, one thread: what the limit is taken from."""

from job import Job, Step


def build(job: Job) -> Step:
    model = job.model()
    optimizer = job.optimizer(model.parameters())

    return job.plain_step(model, optimizer)
