"""Contenders whose users write for a library: Accelerate, transformers' Trainer, Fabric and
Lightning's Trainer. Each trains `under` "ddp" (its default), "fsdp2" or "shardwise" in row `zero`.

In bf16-mixed the autocast of Accelerate and Fabric is their own, which also converts the model's
output to fp32.
"""

import os
import sys
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from threading import Thread
from typing import Any

from torch import Tensor, nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import models
from job import Job, Step

Batch = tuple[Tensor, Tensor]
Run = Callable[[Iterator[Batch], Callable[[Tensor], None]], Any]
"""Trains on the batches, and calls the function with the loss after each step."""


def accelerate(job: Job, *, under: str = "ddp", zero: int = 0) -> Step:
    """Accelerate. It takes no FSDP plugin on the CPU: FSDP2 is applied to the model before."""
    from accelerate import Accelerator

    _join(job, under)
    precision = "bf16" if job.setting.precision == "bf16-mixed" else "no"
    if under == "shardwise":
        from shardwise.accelerate import Accelerator as Ours

        accelerator = Ours(zero=zero, mixed_precision=precision)
    else:
        accelerator = Accelerator(cpu=not job.on_gpu, mixed_precision=precision)
    model = job.model()
    job.compile(model)
    if under == "fsdp2":
        _shard(job, model)
        optimizer = accelerator.prepare(job.optimizer(model.parameters()))
    else:
        model, optimizer = accelerator.prepare(model, job.optimizer(model.parameters()))

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = models.loss_of(model, inputs, targets)
        accelerator.backward(loss)
        if job.max_norm is not None:
            accelerator.clip_grad_norm_(model.parameters(), job.max_norm)
        optimizer.step()
        return loss

    return step


def fabric(job: Job, *, under: str = "ddp", zero: int = 0) -> Step:
    """Fabric. Its FSDP strategy takes GPUs alone: on the CPU FSDP2 is its ModelParallelStrategy."""
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import ModelParallelStrategy

    _join(job, under)
    strategy: Any = "ddp" if job.size > 1 else "auto"
    if under == "shardwise":
        from shardwise.lightning import ShardwiseFabricStrategy

        strategy = ShardwiseFabricStrategy(zero=zero)
    elif under == "fsdp2":
        strategy = ModelParallelStrategy(lambda model, mesh: _shard(job, model))
    made = Fabric(
        accelerator="cuda" if job.on_gpu else "cpu",
        devices=1 if under == "shardwise" else job.size,
        strategy=strategy,
        precision="bf16-mixed" if job.setting.precision == "bf16-mixed" else "32-true",
    )
    made.launch()
    model = job.model()
    job.compile(model)
    if under == "fsdp2":  # the optimizer must hold the parameters that sharding has replaced
        model = made.setup_module(model)
        optimizer = made.setup_optimizers(job.optimizer(model.parameters()))
    else:
        model, optimizer = made.setup(model, job.optimizer(model.parameters()))

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = models.loss_of(model, inputs, targets)
        made.backward(loss)
        if job.max_norm is not None:
            made.clip_gradients(model, optimizer, max_norm=job.max_norm)
        optimizer.step()
        return loss

    return step


def trainer(job: Job, *, under: str = "ddp", zero: int = 0) -> Step:
    """The Hugging Face Trainer on CPU ranks."""
    import transformers

    _join(job, under)
    base, settings = transformers.Trainer, {}
    if under == "shardwise":
        import shardwise.transformers

        base, settings = shardwise.transformers.Trainer, {"zero": zero}
    transformers.utils.logging.set_verbosity_error()
    arguments = transformers.TrainingArguments(
        "trained",
        max_steps=10**9,  # the crew ends the run
        max_grad_norm=job.max_norm or 0.0,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        ddp_find_unused_parameters=False,  # its faster setting
        dataloader_pin_memory=False,
    )

    def run(batches: Iterator[Batch], over: Callable[[Tensor], None]) -> None:
        class Timed(base):
            last: Tensor

            def get_train_dataloader(self) -> Any:
                return ({"inputs": x, "targets": y} for x, y in batches)

            def compute_loss(self, model: nn.Module, inputs: Any, **_: Any) -> Tensor:
                loss = job.loss(model, inputs["inputs"], inputs["targets"])
                self.last = loss.detach()
                return loss

        class Tells(transformers.TrainerCallback):
            def on_step_end(self, *_: Any, **__: Any) -> None:
                over(made.last)

        model = job.model()
        optimizer = job.optimizer(model.parameters())
        schedule = optim.lr_scheduler.ConstantLR(optimizer, 1.0)
        made = Timed(
            model=model,
            args=arguments,
            optimizers=(optimizer, schedule),
            callbacks=[Tells()],
            **settings,
        )
        made.train()

    return Loop(run).step


def lightning_trainer(job: Job, *, under: str = "ddp", zero: int = 0) -> Step:
    """Lightning's Trainer on CPU ranks."""
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import ModelParallelStrategy

    _join(job, under)
    strategy: Any = ModelParallelStrategy() if under == "fsdp2" else "ddp"
    if under == "shardwise":
        from shardwise.lightning import ShardwiseStrategy

        strategy = ShardwiseStrategy(zero=zero)

    class Module(pl.LightningModule):
        def __init__(self, over: Callable[[Tensor], None]) -> None:
            super().__init__()
            self.model, self._over, self._sharded = job.model(), over, under != "fsdp2"

        def configure_model(self) -> None:
            if not self._sharded:  # Lightning calls this more than once
                _shard(job, self.model)
                self._sharded = True

        def configure_optimizers(self) -> optim.Optimizer:
            return job.optimizer(self.model.parameters())

        def training_step(self, batch: Batch, index: int) -> Tensor:
            return job.loss(self.model, *batch)

        def on_train_batch_end(self, outputs: Any, batch: Batch, index: int) -> None:
            self._over(outputs["loss"].detach())

    def run(batches: Iterator[Batch], over: Callable[[Tensor], None]) -> None:
        made = pl.Trainer(
            accelerator="cpu",
            devices=1 if under == "shardwise" else job.size,
            strategy=strategy,
            gradient_clip_val=job.max_norm,
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
        )
        made.fit(Module(over), _Sized(batches))

    return Loop(run).step


class _Sized:
    """The batches as a loader with a length. Of a loader without one Lightning reads one batch
    ahead, and would wait for a batch before it trains the one it has."""

    def __init__(self, batches: Iterator[Batch]) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return sys.maxsize

    def __iter__(self) -> Iterator[Batch]:
        return self._batches


class Loop:
    """Turns a training loop that a library owns into a function of one step.

    The caller's thread hands over a batch and waits; the library's loop, in another thread,
    trains, hands the loss back, and waits for the next batch. That costs some 50 us a step, the
    same for all whose library owns the loop.
    """

    def __init__(self, run: Run) -> None:
        self._given: SimpleQueue[Batch] = SimpleQueue()
        self._over: SimpleQueue[Tensor | BaseException] = SimpleQueue()
        Thread(target=self._train, args=(run,), daemon=True).start()

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Train one step in the loop; return its loss, or raise the loop's exception."""
        self._given.put((inputs, targets))
        found = self._over.get()
        if isinstance(found, BaseException):
            raise found
        return found

    def _train(self, run: Run) -> None:
        try:
            run(iter(self._given.get, None), self._over.put)
        except BaseException as error:
            self._over.put(error)


def _join(job: Job, under: str) -> None:
    """Join Shardwise's run if it trains `under` the library, else torch's."""
    if under == "shardwise":
        import shardwise as sw
        from contenders.ours import name_rank

        name_rank(job)
        # reseed=False: libraries seed for themselves, and the model has its own seed.
        sw.init(reseed=False, quiet=True, device=job.setting.device)
        return
    if not job.on_gpu:
        os.environ["ACCELERATE_USE_CPU"] = "true"
    if under == "ddp" and job.size == 1:
        return  # as a user starts one process: the libraries then train without DDP
    os.environ |= job.launched()
    job.join_torch()


def _shard(job: Job, model: nn.Module) -> nn.Module:
    """Apply FSDP2 to `model`, one unit per block, as torch_peers.fsdp2 does."""
    mesh = init_device_mesh(job.setting.device, (job.size,))
    for unit in [*models.blocks(model), model]:
        fully_shard(unit, mesh=mesh)
    return model
