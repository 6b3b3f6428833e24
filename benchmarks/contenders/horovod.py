"""shardwise.horovod, as a script written for Horovod uses it: the plain loop, and the optimizer."""

import os

import shardwise.horovod as hvd
from contenders.shardwise import identity
from job import Job, Step
from shardwise.net import environment


def build(job: Job) -> Step:
    if job.max_norm is not None:
        raise NotImplementedError("--clip in Horovod's style is not measured")
    os.environ |= environment.identity_variables(identity(job)) | {"SHARDWISE_QUIET": "on"}
    hvd.init()
    model = job.model()
    optimizer = hvd.DistributedOptimizer(
        job.optimizer(model.parameters()), named_parameters=model.named_parameters()
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    return job.plain_step(model, optimizer)
