"""Lightning Fabric with its own wrapping of DDP, FSDP2, or Shardwise under it.

Its FSDP strategy takes GPUs alone: on the CPU FSDP2 comes by its ModelParallelStrategy. In
bf16-mixed the autocast is Fabric's own, which also converts the model's output to fp32.
"""

from typing import Any

from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy
from torch import Tensor, nn

import models
from contenders import joining
from job import Job, Step


def build(job: Job, *, under: str = "ddp", zero: int = 0) -> Step:
    """With `under` "shardwise" its row `zero` trains."""
    joining.join(job, under)
    fabric = Fabric(
        accelerator="cuda" if job.on_gpu else "cpu",
        devices=1 if under == "shardwise" else job.size,
        strategy=_strategy(job, under, zero),
        precision="bf16-mixed" if job.setting.precision == "bf16-mixed" else "32-true",
    )
    fabric.launch()
    model = job.model()
    job.compile(model)
    if under == "fsdp2":
        model = fabric.setup_module(model)
        optimizer = fabric.setup_optimizers(job.optimizer(model.parameters()))
    else:
        model, optimizer = fabric.setup(model, job.optimizer(model.parameters()))

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = models.loss_of(model, inputs, targets)
        fabric.backward(loss)
        with job.updating():
            if job.max_norm is not None:
                fabric.clip_gradients(model, optimizer, max_norm=job.max_norm)
            optimizer.step()
        return loss

    return step


def _strategy(job: Job, under: str, zero: int) -> Any:
    if under == "shardwise":
        from shardwise.lightning import ShardwiseFabricStrategy

        return ShardwiseFabricStrategy(zero=zero)
    if under == "fsdp2":
        return ModelParallelStrategy(lambda model, mesh: _sharded(job, model))
    return "ddp" if job.size > 1 else "auto"


def _sharded(job: Job, model: nn.Module) -> nn.Module:
    joining.shard(job, model)
    return model
