"""The Hugging Face Trainer on CPU ranks: over DDP as it comes, or over Shardwise."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from contenders import joining
from job import Job, Step
from loops import Batch, Loop


def build(job: Job, *, under: str = "ddp", zero: int = 0) -> Step:
    """With `under` "shardwise" its row `zero` trains."""
    joining.join(job, under)
    return Loop(lambda batches, over: _trainer(job, under, zero, batches, over).train()).step


def _trainer(
    job: Job, under: str, zero: int, batches: Iterator[Batch], over: Callable[[Tensor], None]
) -> Any:
    """A trainer whose batches are given, and whose losses are `over` as a step ends."""
    base, settings = transformers.Trainer, {}
    if under == "shardwise":
        import shardwise.transformers

        base, settings = shardwise.transformers.Trainer, {"zero": zero}

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
            over(trainer.last)

    model = job.model()
    optimizer = job.optimizer(model.parameters())
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    transformers.utils.logging.set_verbosity_error()
    trainer = Timed(
        model=model,
        args=_arguments(job),
        optimizers=(optimizer, schedule),
        callbacks=[Tells()],
        **settings,
    )
    return trainer


def _arguments(job: Job) -> transformers.TrainingArguments:
    return transformers.TrainingArguments(
        "trained",
        max_steps=10**9,
        max_grad_norm=job.max_norm or 0.0,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        ddp_find_unused_parameters=False,  # its faster setting
        dataloader_pin_memory=False,
    )
