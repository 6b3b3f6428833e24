"""Shardwise, by the API that its users write; its options are the row, the transport and any
other setting of the engine."""

import os
from concurrent.futures import wait
from typing import Any

from torch import Tensor, nn

import models
import shardwise as sw
from job import Job, Step
from shardwise.net import environment
from shardwise.net.identity import Identity


def build(job: Job, **options: Any) -> Step:
    model, engine = prepare(job, **options)

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        loss = models.loss_of(model, inputs, targets)  # autocast is the engine's own
        engine.backward(loss, weight=len(inputs))
        with job.updating():
            engine.step(job.max_norm)
            _wait_for_writes(engine)
        return loss

    return step


def prepare(
    job: Job, *, zero: int, transport: str = "auto", islands: int = 1, **settings: Any
) -> tuple[nn.Module, sw.Engine]:
    """Join the run and make the engine."""
    os.environ |= environment.identity_variables(identity(job))
    sw.init(seed=0, quiet=True, transport=transport, islands=islands, device=job.setting.device)
    model = job.model()
    optimizer = job.optimizer(model.parameters())
    engine = sw.Engine(model, optimizer, zero=zero, **_of(job) | settings)
    job.told["bytes"] = lambda: _bytes(engine)
    return model, engine


def _wait_for_writes(engine: sw.Engine) -> None:
    """Wait for what a disk is still writing, which belongs to the update."""
    for factory in engine._states.storage_factories.values():
        for store in factory._stores:
            for _, transfer in store._behind.values():
                wait(transfer)


def _of(job: Job) -> dict[str, Any]:
    """The engine's settings for the precision and the compiler; torch.compile's own backend is the
    only one that it has."""
    precision = {"tf32": "fp32"}.get(job.setting.precision, job.setting.precision)
    if job.setting.compiled not in ("", "inductor"):
        raise ValueError(f"the engine compiles by inductor, not by {job.setting.compiled}")
    return {"precision": precision, "compile": bool(job.setting.compiled)}


def _bytes(engine: sw.Engine) -> dict[str, Any]:
    """What this rank holds of each state, wherever it rests, and how much of it is padding."""
    states = engine._states
    buckets = states.parameters.buckets
    used = sum(named.shape.numel() for named in states.parameters.named)
    return {
        "all": engine.state_bytes,
        "parameters": states.parameters.state_bytes,
        "gradients": states.gradients.state_bytes,
        "optimizer": states.optimizer.state_bytes,
        "numel": used,
        "padding": sum(bucket.numel for bucket in buckets) / used - 1,
    }


def identity(job: Job) -> Identity:
    """What `shardwise run` would have told this rank."""
    return Identity(
        launcher="shardwise run",
        rank=job.rank,
        size=job.size,
        local_rank=job.local_rank,
        local_size=job.local_size,
        address=job.address,
        port=job.port,
        listen_fd=job.listen_fd,
    )
