"""torch's fused AdamW alone: no forward, no backward, gradients that stay as they are.

One process with as many threads as the others have ranks, over the model's parameters one by one
or over one flat tensor of as many elements.
"""

import torch
from torch import Tensor, nn

from job import Job, Step


def build(job: Job, *, threads: int, flat: bool) -> Step:
    torch.set_num_threads(threads)
    parameters = list(job.model().parameters())
    if flat:
        parameters = [nn.Parameter(torch.cat([p.detach().flatten() for p in parameters]))]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter) * 1e-3
    optimizer = job.optimizer(parameters)

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        with job.updating():
            optimizer.step()
        return torch.zeros(())

    return step
