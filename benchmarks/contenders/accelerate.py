"""Hugging Face Accelerate on CPU ranks: its own wrapping of DDP, with its default settings."""

import os

from accelerate import Accelerator
from torch import Tensor

from job import Job, Step


def build(job: Job) -> Step:
    os.environ |= job.launched()
    job.join_torch()
    accelerator = Accelerator(cpu=True)
    model = job.model()
    model, optimizer = accelerator.prepare(model, job.optimizer(model.parameters()))

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = job.loss(model, inputs, targets)
        accelerator.backward(loss)
        with job.updating():
            if job.max_norm is not None:
                accelerator.clip_grad_norm_(model.parameters(), job.max_norm)
            optimizer.step()
        return loss

    return step
