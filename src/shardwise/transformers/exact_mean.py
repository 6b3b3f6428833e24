"""Lets every item of a step count once and alike, with `Trainer(exact_mean=True)`.

Items are labels that count (not -100), or samples where there are no such labels. The model is told
of the items of its own micro-batch, so that its loss is a mean over them, whether it divides a sum
by their number or takes the mean by itself. Each backward is weighed by that number, and nothing is
divided by micro-batches or multiplied by workers:

    micro-batches of 5, 2 and 9 labels     here                  a model that ignores their number
    loss of the second                     its mean, weight 2    its mean, as much as the others
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import find_batch_size
from torch import Tensor
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.trainer import unwrap_peft_model

from shardwise.accelerate import Accelerator
from shardwise.accelerate.exact_mean import last_batch
from shardwise.bridging.given_batches import Given
from shardwise.bridging.trained_engine import LossItems
from shardwise.errors import UsageError

ItemsOf = Callable[[Any], Any]
"""The number of items that the loss of a batch is a mean over."""

IGNORED = -100
"""The label that losses leave out."""

_UNSHIFTED = {
    *(f"{name}ForCausalLM" for name in ("Bart", "BigBirdPegasus", "Blenderbot", "BlenderbotSmall")),
    *(f"{name}ForCausalLM" for name in ("MBart", "Marian", "Mvp", "PLBart", "Pegasus", "TrOCR")),
    *(f"{name}ForCausalLM" for name in ("CpmAnt", "ProphetNet", "Whisper")),
    "XLMWithLMHeadModel",
    "XLNetLMHeadModel",
}
"""Causal models of transformers whose forward compares labels with logits of the same place."""


class WeighingAccelerator(Accelerator):
    """The Accelerator of a Trainer with `exact_mean`: a backward is of a mean over `items`."""

    items: LossItems | None = None

    def _items_of(self, kwargs: dict[str, Any]) -> LossItems | None:
        return self.items


class ExactMean:
    """What `trainer` knows of the batches of a step: how many items each has, and all of them.

    `items_of` counts the items of a batch where the script says how.
    """

    def __init__(self, trainer: Any, items_of: ItemsOf | None) -> None:
        self._trainer = trainer
        self._items_of = items_of
        self._given: dict[int, Given] = {}
        self._items: list[tuple[Any, Tensor]] = []
        """The batches of the step, which are held so that no other one takes their identity."""
        self._total = torch.zeros(())
        self._losses: list[Tensor] = []
        """Of an evaluation, by batch: the loss times its items, and the items."""
        self._evaluated_loader: Any = None
        """What gives the batches of the evaluation that goes on, where Accelerate prepared it."""
        self.items_of_evaluated: Tensor | None = None
        """How many items, or 1, the batch has that an evaluation computes the loss of now."""

    def window(
        self,
        read: Callable[..., tuple[list[Any], Any]],
        batches: Iterator[Any],
        count: int,
        device: torch.device,
    ) -> tuple[list[Any], Tensor]:
        """The batches of a step, by the trainer's own `read`, without repeated samples; and the
        number of their items on all workers. Collective."""
        self._given.clear()
        with self._means_of_one_batch():
            found, _ = read(map(self._taken, batches), count, device)
        self._items = [(batch, self._counted(batch, device)) for batch in found]
        zero = torch.zeros((), dtype=torch.float64, device=device)
        own = sum((items for _, items in self._items), zero)
        self._total = self._trainer.accelerator.reduce(own, "sum")
        return found, self._total

    def _taken(self, batch: Any) -> Any:
        """`batch`, the last one that the loader gave, without rows that count nothing."""
        shown, given = self._cut(batch, self._trainer.accelerator.gradient_state.active_dataloader)
        self._given[id(shown)] = given
        return shown

    def _cut(self, batch: Any, loader: Any) -> tuple[Any, Given]:
        if loader is None:  # batches of a loader that Accelerate has not prepared
            return batch, Given(find_batch_size(batch), is_cut=False)
        return last_batch(loader, batch, self._trainer.accelerator.world, cuts=True)

    def _counted(self, batch: Any, device: torch.device) -> Tensor:
        """The number of items of `batch`, 0 where it has samples only that counted before."""
        given = self._given.get(id(batch))
        return self._number(
            batch, find_batch_size(batch) if given is None else given.samples, device
        )

    def _number(self, batch: Any, samples: int, device: torch.device) -> Tensor:
        items: Any = samples
        if samples and self._items_of is not None:
            items = self._items_of(batch)
        elif samples:
            items = self._labels(batch, samples)
        return torch.as_tensor(items, dtype=torch.float64, device=device).detach().reshape(())

    def _labels(self, batch: Any, samples: int) -> Any:
        """How many labels of `batch` count; its `samples` where labels are none of classes."""
        shifted = "shift_labels" in batch
        labels = batch["shift_labels"] if shifted else batch.get("labels")
        if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.ndim == 0:
            return samples
        if not shifted and labels.ndim > 1 and self._shifts_labels():
            labels = labels[..., 1:]
        return labels.ne(IGNORED).sum()

    def _shifts_labels(self) -> bool:
        """Whether the loss leaves the first label of a row out.

        The trainer finds out by the name of the class, which does not tell it of GPT2LMHeadModel
        and its like, and misleads it about BartForCausalLM and its like.
        """
        model = unwrap_peft_model(self._trainer.model)
        name = type(model).__name__
        if name in _UNSHIFTED:
            return False
        if self._trainer._loss_shifts_labels:
            return True
        shifts = getattr(model, "loss_function", None) is ForCausalLMLoss
        return shifts and name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()

    @contextmanager
    def micro_batch(self, batch: Any) -> Iterator[tuple[Tensor, Callable[[Tensor], Tensor]]]:
        """Inside the block losses are means over `batch` alone, and a backward counts its items.

        Gives their number, for the model, and what makes of the loss its part of the step's, of
        which the trainer takes the mean over workers.
        """
        found = [items for known, items in self._items if known is batch]
        if not found:
            raise UsageError(
                "exact_mean=True, and training_step was given a batch that get_batch_samples has "
                "not: how much it weighs cannot be told. Change batches in the data_collator, or "
                "in _prepare_inputs."
            )
        (items,), total = found, self._total
        accelerator = self._trainer.accelerator
        workers = accelerator.world.size

        def part(loss: Tensor) -> Tensor:
            return torch.where(items > 0, loss * (items / total * workers), 0.0).to(loss.dtype)

        accelerator.items = LossItems(items, same_items=False)
        try:
            with self._means_of_one_batch():
                yield items.clamp(min=1), part
        finally:
            accelerator.items = None

    # -- an evaluation ----------------------------------------------------------------------

    def begin_evaluation(self, loader: Any) -> None:
        """Forget the losses of the one before; batches of this one come of `loader`."""
        self._losses.clear()
        is_prepared = hasattr(loader, "end_of_dataloader")
        self._evaluated_loader = loader if is_prepared else None

    def evaluated(self, step: Callable[..., Any], model: Any, batch: Any, *how: Any) -> Any:
        """What `step`, the trainer's own, gives for a batch of an evaluation, whose loss counts.

        Of a last batch with repeated samples the loss is computed again without them. Collective.
        """
        device = self._trainer.args.device
        shown, given = self._cut(batch, self._evaluated_loader)
        items = whole = self._number(shown, given.samples, device)
        if given.is_cut:
            whole = self._number(batch, find_batch_size(batch), device)
        with self._told(whole):
            found = step(model, batch, *how)
        loss = found[0]
        if self._trainer.accelerator.world.any(given.is_cut):
            with self._told(items):
                loss = step(model, shown, True, *how[1:])[0]
        if loss is not None:
            loss = torch.where(items > 0, loss.to(device, torch.float64) * items, 0.0)
            self._losses.append(torch.stack([loss, items]))
        return found

    @contextmanager
    def _told(self, items: Tensor) -> Iterator[None]:
        """Inside the block a model that asks is told of so many `items` in its batch."""
        self.items_of_evaluated = items.clamp(min=1)
        try:
            with self._means_of_one_batch():
                yield
        finally:
            self.items_of_evaluated = None

    def mean_of_evaluation(self) -> float | None:
        """The mean over all items of all workers; None without losses. Collective."""
        if not self._losses:
            return None
        total, items = self._trainer.accelerator.reduce(torch.stack(self._losses).sum(0), "sum")
        return float(total / items)

    @contextmanager
    def _means_of_one_batch(self) -> Iterator[None]:
        """Inside the block the trainer neither adds up items of workers nor divides by steps."""
        trainer, arguments = self._trainer, self._trainer.args
        before = arguments.average_tokens_across_devices, trainer.loss_is_scaled_for_ga
        arguments.average_tokens_across_devices, trainer.loss_is_scaled_for_ga = False, True
        try:
            yield
        finally:
            arguments.average_tokens_across_devices, trainer.loss_is_scaled_for_ga = before
