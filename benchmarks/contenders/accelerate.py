"""Hugging Face Accelerate on CPU ranks: its own wrapping of DDP, FSDP2, or Shardwise under it.

It takes no FSDP plugin on the CPU: FSDP2 is applied to the model before, as it is for one.
"""

from accelerate import Accelerator
from torch import Tensor

from contenders import joining
from job import Job, Step


def build(job: Job, *, under: str = "ddp", zero: int = 0) -> Step:
    """With `under` "shardwise" its row `zero` trains."""
    joining.join(job, under)
    if under == "shardwise":
        from shardwise.accelerate import Accelerator as Ours

        accelerator = Ours(zero=zero)
    else:
        accelerator = Accelerator(cpu=True)
    model = job.model()
    if under == "fsdp2":
        joining.shard(job, model)
        optimizer = accelerator.prepare(job.optimizer(model.parameters()))
    else:
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
