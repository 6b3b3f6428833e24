"""Shardwise with two saves on the way: one in the foreground, then one in the background.

`told["saves"]` has the seconds that each call of `engine.save` took, and the bytes of the
checkpoint. The times of the steps show for how long the saves held up training.
"""

import shutil
import time
from pathlib import Path
from typing import Any

from torch import Tensor

import models
from contenders import shardwise
from job import Job, Step

FOREGROUND, BACKGROUND = 5, 7
"""Numbers of the steps that begin with a save; those before them warm up and give the base."""


def build(job: Job, *, folder: str, **options: Any) -> Step:
    model, engine = shardwise.prepare(job, **options)
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
