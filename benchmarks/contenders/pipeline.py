"""Shardwise with its layers shared out, by the call that its users write; its options are settings
of the run. One rank, with micro-batches alone, is what the waiting is measured against."""

import os
from functools import partial
from typing import Any

from torch import Tensor

import shardwise as sw
from contenders.shardwise import identity
from job import Job, Step
from shardwise.net import environment


def build(job: Job, *, transport: str = "auto", **settings: Any) -> Step:
    os.environ |= environment.identity_variables(identity(job))
    sw.init(seed=0, quiet=True, transport=transport, pipeline=job.size)
    model = job.model()
    engine = sw.Engine(model, job.optimizer(model.parameters()), **settings)

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        loss = engine.forward_backward(partial(job.loss, model), inputs, targets)
        with job.updating():
            engine.step()
        return loss

    return step
