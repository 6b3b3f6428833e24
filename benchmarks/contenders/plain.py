"""One plain PyTorch process on the whole batch, one thread: what the limit is taken from."""

from torch import Tensor

from job import Job, Step


def build(job: Job) -> Step:
    model = job.model()
    optimizer = job.optimizer(model.parameters())

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = job.loss(model, inputs, targets)
        loss.backward()
        optimizer.step()
        return loss

    return step
