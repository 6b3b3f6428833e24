"""Shardwise, by the API that its users write; options are the row, the transport and any other
setting of the engine."""

import os
import shutil
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import models
import shardwise as sw
from job import Job, Step
from shardwise.net import environment
from shardwise.net.identity import Identity

FOREGROUND, BACKGROUND = 5, 7
"""Numbers of the steps that begin with a save; those before them warm up and give the base."""


def build(job: Job, **options: Any) -> Step:
    """The engine in one row."""
    model, engine = prepare(job, **options)

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        loss = models.loss_of(model, inputs, targets)  # autocast is the engine's own
        # Without a Loader the engine cannot know the number of rows.
        engine.backward(loss, weight=len(inputs))
        engine.step(job.max_norm)
        return loss

    return step


def prepare(
    job: Job,
    *,
    zero: int,
    transport: str = "auto",
    islands: int = 1,
    on_meta: bool = False,
    **settings: Any,
) -> tuple[nn.Module, sw.Engine]:
    """Join the run and create the engine; `on_meta` is for models that do not fit on the device."""
    name_rank(job)
    sw.init(seed=0, quiet=True, transport=transport, islands=islands, device=job.setting.device)
    if on_meta:
        with sw.on_meta():
            model: nn.Module = models.build(job.workload)
        # torch's fused kernel refuses parameters on meta; the engine uses the fused one later.
        optimizer = torch.optim.AdamW(model.parameters(), **job.hyperparameters | {"fused": None})
    else:
        model = job.model()
        optimizer = job.optimizer(model.parameters())
    if job.setting.compiled not in ("", "inductor"):
        raise ValueError(f"the engine compiles by inductor, not by {job.setting.compiled}")
    precision = {"tf32": "fp32"}.get(job.setting.precision, job.setting.precision)
    settings = {"precision": precision, "compile": bool(job.setting.compiled)} | settings
    numel = sum(parameter.numel() for parameter in model.parameters())  # before it is sharded
    engine = sw.Engine(model, optimizer, zero=zero, **settings)
    job.told["bytes"] = lambda: {"all": engine.state_bytes, "numel": numel}
    return model, engine


def name_rank(job: Job) -> None:
    """Set the variables that `shardwise run` would have set for this rank."""
    identity = Identity(
        launcher="shardwise run",
        rank=job.rank,
        size=job.size,
        local_rank=job.local_rank,
        local_size=job.local_size,
        address=job.address,
        port=job.port,
        listen_fd=job.listen_fd,
    )
    os.environ |= environment.identity_variables(identity)


def pipelined(job: Job, *, transport: str = "auto", **settings: Any) -> Step:
    """The engine with its layers on several ranks. One rank, with micro-batches alone, is the base
    of the waiting."""
    name_rank(job)
    sw.init(seed=0, quiet=True, transport=transport, pipeline=job.size)
    model = job.model()
    engine = sw.Engine(model, job.optimizer(model.parameters()), **settings)

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        loss = engine.forward_backward(partial(job.loss, model), inputs, targets)
        engine.step()
        return loss

    return step


def saving(job: Job, *, folder: str, **options: Any) -> Step:
    """The engine with two saves: one in the foreground, then one in the background.

    `told["saves"]` has the seconds that each call of `engine.save` took, and the bytes of the
    checkpoint. The times of the steps show for how long the saves held up training.
    """
    model, engine = prepare(job, **options)
    saves: dict[str, float] = {}
    job.told["saves"] = lambda: saves
    steps = 0

    def save(way: str) -> None:
        path = Path(folder) / way
        begun = time.perf_counter()
        engine.save(path, background=way == "background")
        saves[way] = time.perf_counter() - begun
        if way == "foreground":
            saves["bytes"] = sum(f.stat().st_size for f in path.rglob("*") if f.is_file())
            shutil.rmtree(path)  # a disk may have no room for two

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        nonlocal steps
        if steps == FOREGROUND:
            save("foreground")
        if steps == BACKGROUND:
            save("background")
        steps += 1
        loss = models.loss_of(model, inputs, targets)
        engine.backward(loss, weight=len(inputs))
        engine.step(job.max_norm)
        return loss

    return step
