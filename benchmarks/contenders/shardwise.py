"""Shardwise, by the API that its users write; the row is its only option."""

import os

from torch import Tensor

import shardwise as sw
from job import Job, Step
from shardwise.launch import own
from shardwise.launch.identity import Identity


def build(job: Job, *, zero: int) -> Step:
    os.environ |= own.environment(_identity(job))
    sw.init(seed=0, quiet=True)
    model = job.model()
    engine = sw.Engine(model, job.optimizer(model.parameters()), zero=zero)

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        loss = job.loss(model, inputs, targets)
        engine.backward(loss, weight=len(inputs))
        engine.step()
        return loss

    return step


def _identity(job: Job) -> Identity:
    """What `shardwise run` would have told this rank."""
    return Identity(
        launcher="shardwise run",
        rank=job.rank,
        size=job.size,
        local_rank=job.rank,
        local_size=job.size,
        address="127.0.0.1",
        port=job.port,
        listen_fd=job.listen_fd,
    )
