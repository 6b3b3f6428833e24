"""Makes Trainers train with engines, in transformers and in libraries that are based on it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from torch import nn
from transformers import trainer as stock

from shardwise.accelerate import Accelerator, checkpoints
from shardwise.accelerate.deepspeed_plugin import ALREADY_READ, with_scaling
from shardwise.bridging.deepspeed_json import say_settings, settings_of
from shardwise.bridging.joining import SETTINGS
from shardwise.transformers.deepspeed_argument import OptimizersOfJson, check_plugin, job_of
from shardwise.transformers.exact_mean import StepItems, WeighingAccelerator
from shardwise.transformers.joining import check_arguments, check_loss, context_size, trl_classes

SCHEDULER = "scheduler.pt"
"""The file in which transformers saves the state of the schedule."""


class Sharded(OptimizersOfJson):
    """Mixin that precedes a Trainer class and makes it train with engines.

    The result is the same as with the stock Trainer and DistributedDataParallel.
    docs/from_transformers.md lists the differences.

    Args:
        *arguments: Arguments of the trainer, by position or by keyword.
        exact_mean: If True, every label of a step has the same weight, just as if a single process
            had the full batch. If there are no class labels, every sample has the same weight. It
            may also be a function that returns the number of items in a batch. Default: False.
        **keywords: Shardwise settings, such as `zero=3`.

    Example:
        ```python
        from shardwise.transformers import Trainer

        trainer = Trainer(model, args, train_dataset=dataset, zero=3, exact_mean=True)
        trainer.train()
        ```
    """

    accelerator: Accelerator
    args: Any
    model: nn.Module
    lr_scheduler: Any
    state: Any
    _settings: dict[str, Any]
    _exact: StepItems | None = None

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        self._take(keywords)
        super().__init__(*arguments, **keywords)
        self.check_optimizers()
        check_loss(self)

    def _take(self, keywords: dict[str, Any]) -> None:
        """Pop the Shardwise settings from `keywords`."""
        self._settings = {name: keywords.pop(name) for name in SETTINGS & keywords.keys()}
        exact = keywords.pop("exact_mean", False)
        if exact:
            self._exact = StepItems(self, exact if callable(exact) else None)

    def create_accelerator_and_postprocess(self) -> None:
        """Create Shardwise's Accelerator in place of the stock one."""
        job = job_of(self.args)
        settings = self._settings if job is None else settings_of(job) | self._settings
        if context_size(self.args) > 1 and self._exact is None:
            # A mean of means would be wrong, because parts have different numbers of labels.
            self._exact = StepItems(self, None)
        kind = Accelerator if self._exact is None else WeighingAccelerator

        def make(**arguments: Any) -> Accelerator:
            check_plugin(arguments.get("deepspeed_plugin"))
            arguments["deepspeed_plugin"] = ALREADY_READ
            if job is not None:
                handlers = with_scaling(arguments.get("kwargs_handlers"), job)
                arguments["kwargs_handlers"] = handlers
            return kind(**arguments, **settings)

        # transformers looks the class up in its module, so replace it there during the call.
        theirs, stock.Accelerator = stock.Accelerator, make
        try:
            super().create_accelerator_and_postprocess()  # type: ignore[misc]
        finally:
            stock.Accelerator = theirs
        check_arguments(self.args, self.accelerator.world.size)
        if job is not None:
            say_settings(self.accelerator.world, job)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Move `model` to the device, unless another Trainer's engine has already placed it."""
        if not self.accelerator.is_trained(model):
            super()._move_model_to_device(model, device)  # type: ignore[misc]

    # -- a step -----------------------------------------------------------------------------

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """Return the batches of a step and their number of items. Collective.

        With `exact_mean`, the batches contain no repeated samples.
        """
        read = super().get_batch_samples  # type: ignore[misc]
        if self._exact is None:
            return read(epoch_iterator, num_batches, device)
        return self._exact.window(read, epoch_iterator, num_batches, device)

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: Any) -> Any:
        """Return the number of items in a batch.

        In an evaluation with `exact_mean`, repeated samples are not counted.
        """
        items = None if self._exact is None else self._exact.items_of_evaluated
        if items is not None:
            return items
        return super()._get_num_items_in_batch(batch_samples, device)  # type: ignore[misc]

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """Run a micro-batch's forward and backward pass. Return its loss.

        With `exact_mean`, the loss is weighted by the micro-batch's number of items.
        """
        step = super().training_step  # type: ignore[misc]
        if self._exact is None:
            return cast(torch.Tensor, step(model, inputs, num_items_in_batch))
        with self._exact.micro_batch(inputs) as (batch, items, part):
            return part(step(model, batch, items))

    def compute_loss(self, *arguments: Any, **keywords: Any) -> Any:
        """Compute the loss of a batch. TRL also adds up the tokens of all workers here."""
        accelerator, compute = self.accelerator, super().compute_loss  # type: ignore[misc]
        if accelerator.sequences is None or not trl_classes(self):
            return compute(*arguments, **keywords)
        # Its values are numbers of tokens of each part.
        accelerator.__dict__["gather_for_metrics"] = accelerator.gather
        try:
            return compute(*arguments, **keywords)
        finally:
            del accelerator.__dict__["gather_for_metrics"]

    def get_total_train_batch_size(self, args: Any) -> int:
        """Return the number of samples per step. A context group counts once."""
        total = int(super().get_total_train_batch_size(args))  # type: ignore[misc]
        return total // self.accelerator.world.context_size

    def _track_num_input_tokens(self, inputs: Any) -> None:
        """Count the tokens of a batch. A context group counts once."""
        before = self.state.num_input_tokens_seen
        super()._track_num_input_tokens(inputs)  # type: ignore[misc]
        added = self.state.num_input_tokens_seen - before
        self.state.num_input_tokens_seen = before + added // self.accelerator.world.context_size

    def floating_point_ops(self, inputs: Any) -> float:
        """Return this rank's share of the operations on a batch. The Trainer adds up the shares."""
        whole = super().floating_point_ops(inputs)  # type: ignore[misc]
        return float(whole) / self.accelerator.world.context_size

    # -- saving -----------------------------------------------------------------------------

    def _save(
        self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None
    ) -> None:
        """Write the full model for `from_pretrained`. Collective."""
        if state_dict is None and self.accelerator.is_trained(self.model):
            state_dict = self.accelerator.get_state_dict(self.model)
        super()._save(output_dir, state_dict)  # type: ignore[misc]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Write the engines' checkpoint and the schedule. Collective."""
        world = self.accelerator.world
        checkpoints.save(self.accelerator.engines, Path(output_dir), world)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER))

    # -- loading ----------------------------------------------------------------------------

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load a checkpoint written by this class or by a stock Trainer. Collective."""
        if checkpoint is None or not checkpoints.is_ours(Path(checkpoint)):
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
            return
        self.accelerator.load_engines(checkpoint)
        schedule = torch.load(os.path.join(checkpoint, SCHEDULER), weights_only=True)
        self.lr_scheduler.load_state_dict(schedule)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        with self._writable():
            super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]

    def _load_best_model(self) -> None:
        """Load the best checkpoint's weights. Collective."""
        # The engines load it if they wrote it, which also works at a different world size.
        best = self.state.best_model_checkpoint
        if self.accelerator.engines and checkpoints.is_ours(Path(best)):
            self.accelerator.load_engines(best, model_only=True)
            return
        with self._writable():
            super()._load_best_model()  # type: ignore[misc]

    @contextmanager
    def _writable(self) -> Iterator[None]:
        """Context manager in which the weights are gathered and can be written to."""
        with self.accelerator.full_parameters(self.model, write=True):
            yield

    # -- evaluation -------------------------------------------------------------------------

    def evaluation_loop(self, dataloader: Any, *arguments: Any, **keywords: Any) -> Any:
        """Evaluate. With `exact_mean`, the loss is the mean over all items. Collective."""
        if self._exact is not None:
            self._exact.begin_evaluation(dataloader)
        output = super().evaluation_loop(dataloader, *arguments, **keywords)  # type: ignore[misc]
        mean = None if self._exact is None else self._exact.mean_of_evaluation()
        name = f"{keywords.get('metric_key_prefix', 'eval')}_loss"
        if mean is not None and name in output.metrics:
            output.metrics[name] = mean
        return output

    def prediction_step(
        self,
        model: nn.Module,
        inputs: Any,
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
        **keywords: Any,
    ) -> Any:
        """Predict a batch. Generated sequences may have different lengths on different ranks."""
        step = partial(super().prediction_step, **keywords)  # type: ignore[misc]
        with self._generates_apart():
            if self._exact is None:
                return step(model, inputs, prediction_loss_only, ignore_keys)
            return self._exact.evaluate_batch(
                step, model, inputs, prediction_loss_only, ignore_keys
            )

    @contextmanager
    def _generates_apart(self) -> Iterator[None]:
        """Context manager in which ranks may run different numbers of passes in `generate`."""
        plain = getattr(self.model, "generate", None)
        if plain is None:
            yield
            return

        # Only wrap `generate`, not the entire step. Otherwise a rank that has finished generating
        # would wait in the step's collectives, while others still need it for their forward passes.
        def generate(*arguments: Any, **keywords: Any) -> Any:
            with self.accelerator.uneven(self.model):
                return plain(*arguments, **keywords)

        own = vars(self.model)
        before = {"generate": own["generate"]} if "generate" in own else {}
        own["generate"] = generate
        try:
            yield
        finally:
            del own["generate"]
            own.update(before)


def on(trainer: type[Any]) -> type[Any]:
    """Return a subclass of `trainer` that trains with engines.

    Args:
        trainer: A class derived from transformers.Trainer.

    Example:
        ```python
        from trl import SFTTrainer

        SFT = shardwise.transformers.on(SFTTrainer)
        ```
    """
    if issubclass(trainer, Sharded):
        return trainer
    return type(trainer.__name__, (Sharded, trainer), {"__doc__": trainer.__doc__})


def prepare_trainer(trainer: Any, **settings: Any) -> Any:
    """Make a trainer use engines, and return it. The trainer must not have started training yet.

    Args:
        trainer: A transformers.Trainer, or an object of a derived class.
        **settings: Shardwise settings, such as `zero=3`, and `exact_mean`.

    Raises:
        TypeError: If a setting is unknown.

    Example:
        ```python
        trainer = shardwise.transformers.prepare_trainer(trainer, zero=2)
        trainer.train()
        ```
    """
    trainer.__class__ = on(type(trainer))
    trainer._take(settings)
    if settings:
        raise TypeError(
            f"prepare_trainer() takes no {next(iter(settings))}: pass settings of Shardwise."
        )
    trainer.create_accelerator_and_postprocess()
    trainer.check_optimizers()
    check_loss(trainer)
    return trainer


Trainer = cast(Any, on(transformers.Trainer))
Seq2SeqTrainer = cast(Any, on(transformers.Seq2SeqTrainer))
