"""Lightning Fabric on CPU ranks: its own wrapping of DDP, with its default settings."""

import os

from lightning.fabric import Fabric
from torch import Tensor

from job import Job, Step


def build(job: Job) -> Step:
    os.environ |= job.launched()
    job.join_torch()
    fabric = Fabric(accelerator="cpu", devices=job.size, strategy="ddp", precision="32-true")
    fabric.launch()
    model = job.model()
    model, optimizer = fabric.setup(model, job.optimizer(model.parameters()))

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = job.loss(model, inputs, targets)
        fabric.backward(loss)
        with job.updating():
            if job.max_norm is not None:
                fabric.clip_gradients(model, optimizer, max_norm=job.max_norm)
            optimizer.step()
        return loss

    return step
