"""torch.distributed.pipelining by hand: the GPT cut into stages of equal blocks."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

import models
from job import Job, Step


class Part(nn.Module):
    """Some blocks; the first with the embeddings before, the last with norm and head after."""

    def __init__(self, model: models.GptModel, rank: int, size: int) -> None:
        super().__init__()
        each = len(model.blocks) // size
        self.blocks = model.blocks[rank * each : (rank + 1) * each]
        self.tokens = model.tokens if rank == 0 else None
        self.positions = model.positions if rank == 0 else None
        self.norm = model.norm if rank == size - 1 else None
        self.head = model.head if rank == size - 1 else None

    def forward(self, x: Tensor) -> Tensor:
        if self.tokens is not None and self.positions is not None:
            x = self.tokens(x) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


def build(job: Job, *, schedule: str, microbatches: int) -> Step:
    job.join_torch()
    model = job.model()
    assert isinstance(model, models.GptModel)
    part = Part(model, job.rank, job.size)
    stage = PipelineStage(part, job.rank, job.size, torch.device("cpu"))
    made = get_schedule_class(schedule)(stage, microbatches, loss_fn=models.cross_entropy)
    optimizer = job.optimizer(part.parameters())
    last = job.rank == job.size - 1

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad()
        losses: list[Tensor] = []
        made.step(
            *([inputs] if job.rank == 0 else []), target=targets if last else None, losses=losses
        )
        with job.updating():
            optimizer.step()
        loss = torch.stack(losses).mean().detach() if last else torch.zeros(())
        dist.broadcast(loss, job.size - 1)  # as every loop that logs it
        return loss

    return step
