"""The ranks' own work and nothing else: forward and backward on their rows, and the update of their
part of the parameters. What no exchange can be faster than, on memory that the ranks share."""

from torch import nn

from job import Job, Step


def build(job: Job) -> Step:
    model = job.model()
    optimizer = job.optimizer(_part(list(model.parameters()), job.rank, job.size))

    return job.plain_step(model, optimizer, clear=model.zero_grad)


def _part(parameters: list[nn.Parameter], rank: int, size: int) -> list[nn.Parameter]:
    """About 1/size of the elements: the largest parameters first, each to who has the least."""
    parts: list[list[nn.Parameter]] = [[] for _ in range(size)]
    loads = [0] * size
    for parameter in sorted(parameters, key=lambda p: -p.numel()):
        least = loads.index(min(loads))
        parts[least].append(parameter)
        loads[least] += parameter.numel()
    return parts[rank]
