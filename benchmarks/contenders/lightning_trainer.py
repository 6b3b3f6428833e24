"""Lightning's Trainer on CPU ranks: over DDP as it comes, FSDP2, or over Shardwise."""

import sys
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, optim

from contenders import joining
from job import Job, Step
from loops import Batch, Loop


def build(job: Job, *, under: str = "ddp", zero: int = 0) -> Step:
    """With `under` "shardwise" its row `zero` trains."""
    joining.join(job, under)
    return Loop(lambda batches, over: _fit(job, under, zero, batches, over)).step


class Batches:
    """The batches as a loader that has a length: of others Lightning reads one ahead, and would
    wait for a batch before it trains the one it has."""

    def __init__(self, batches: Iterator[Batch]) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return sys.maxsize

    def __iter__(self) -> Iterator[Batch]:
        return self._batches


class Module(pl.LightningModule):
    """The model of all contenders."""

    def __init__(self, job: Job, under: str, over: Callable[[Tensor], None]) -> None:
        super().__init__()
        self.model, self._job, self._under, self._over = job.model(), job, under, over

    def configure_model(self) -> None:
        """Shard it where FSDP2 is to."""
        if self._under == "fsdp2":
            joining.shard(self._job, self.model)
            self._under = "sharded"

    def configure_optimizers(self) -> optim.Optimizer:
        """That of all contenders."""
        return self._job.optimizer(self.model.parameters())

    def training_step(self, batch: Batch, index: int) -> Tensor:
        """The loss of a batch."""
        return self._job.loss(self.model, *batch)

    def on_train_batch_end(self, outputs: Any, batch: Batch, index: int) -> None:
        """Tell that a step is over."""
        self._over(outputs["loss"].detach())


def _fit(
    job: Job, under: str, zero: int, batches: Iterator[Batch], over: Callable[[Tensor], None]
) -> None:
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1 if under == "shardwise" else job.size,
        strategy=_strategy(under, zero),
        gradient_clip_val=job.max_norm,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(Module(job, under, over), Batches(batches))


def _strategy(under: str, zero: int) -> Any:
    if under == "shardwise":
        from shardwise.lightning import ShardwiseStrategy

        return ShardwiseStrategy(zero=zero)
    return ModelParallelStrategy() if under == "fsdp2" else "ddp"
