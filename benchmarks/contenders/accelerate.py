"""Hugging Face Accelerate with its own wrapping of DDP, FSDP2, or Shardwise under it.

It takes no FSDP plugin on the CPU: FSDP2 is applied to the model before, as it is for one. In
bf16-mixed the autocast is Accelerate's own, which also converts the model's output to fp32.
"""

from accelerate import Accelerator
from torch import Tensor

import models
from contenders import joining
from job import Job, Step


def build(job: Job, *, under: str = "ddp", zero: int = 0) -> Step:
    """With `under` "shardwise" its row `zero` trains."""
    joining.join(job, under)
    precision = "bf16" if job.setting.precision == "bf16-mixed" else "no"
    if under == "shardwise":
        from shardwise.accelerate import Accelerator as Ours

        accelerator = Ours(zero=zero, mixed_precision=precision)
    else:
        accelerator = Accelerator(cpu=not job.on_gpu, mixed_precision=precision)
    model = job.model()
    job.compile(model)
    if under == "fsdp2":
        joining.shard(job, model)
        optimizer = accelerator.prepare(job.optimizer(model.parameters()))
    else:
        model, optimizer = accelerator.prepare(model, job.optimizer(model.parameters()))

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = models.loss_of(model, inputs, targets)
        accelerator.backward(loss)
        with job.updating():
            if job.max_norm is not None:
                accelerator.clip_grad_norm_(model.parameters(), job.max_norm)
            optimizer.step()
        return loss

    return step
