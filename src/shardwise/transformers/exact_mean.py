"""Implements `Trainer(exact_mean=True)`: every item of a step has the same weight.

Items are the labels that are not ignored (not -100), or the samples if there are no class labels.
The model receives the number of items in its micro-batch. Its loss is therefore the mean over these
items, whether it divides a sum by that number or computes the mean itself. The backward pass is
weighted by the same number. Nothing is divided by the number of micro-batches or multiplied by the
number of ranks:

    micro-batches of 5, 2 and 9 labels    with exact_mean       stock, model ignores the number
    loss of the second                    its mean, weight 2    its mean, same weight as the others
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import find_batch_size
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.trainer import unwrap_peft_model

from shardwise.accelerate import Accelerator
from shardwise.accelerate.repeated_samples import last_batch
from shardwise.bridging.exact_mean import CountedBatch, ItemsOf
from shardwise.bridging.sequence_batches import SplitBatch
from shardwise.bridging.trained_engine import LossItems
from shardwise.engine.loss_terms import read
from shardwise.errors import UsageError

CHECKED = 16
"""Number of losses whose items are compared with `--context`. Comparing waits for the GPU."""

IGNORED = -100
"""The label that losses ignore."""

_UNSHIFTED = {
    *(f"{name}ForCausalLM" for name in ("Bart", "BigBirdPegasus", "Blenderbot", "BlenderbotSmall")),
    *(f"{name}ForCausalLM" for name in ("MBart", "Marian", "Mvp", "PLBart", "Pegasus", "TrOCR")),
    *(f"{name}ForCausalLM" for name in ("CpmAnt", "ProphetNet", "Whisper")),
    "XLMWithLMHeadModel",
    "XLNetLMHeadModel",
}
"""transformers' causal models whose forward compares labels with logits at the same position."""


class WeighingAccelerator(Accelerator):
    """The Accelerator of a Trainer with `exact_mean`.

    The loss of the next backward pass is a mean over `items` items.
    """

    items: LossItems | None = None
    _splits_on_read = False
    _left = CHECKED
    """Number of losses whose items are still compared with the labels of their parts."""

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Run the backward pass of `loss` in all engines that it reaches.

        Raises UsageError with `--context` if the loss is a mean over other items than the labels of
        this rank's part.
        """
        # `plan` observes a step on fake tensors, which have no values to compare.
        is_checked = self._left and not isinstance(loss, FakeTensor)
        if self.sequences is not None and self.items is not None and is_checked:
            self._left -= 1
            self._check_items(loss, self.items)
        super().backward(loss, **kwargs)

    def _check_items(self, loss: Tensor, items: LossItems) -> None:
        main = read(loss, items.rows).main
        counted = None
        if main is not None:
            # The divisor may be the number that Shardwise has passed to the model.
            counted = float(main.items if main.counted is None else main.counted)
        labels = float(items.number or 0)
        own = [counted, labels] if labels and counted not in (None, labels) else None
        # A label is missing on one rank only, but all ranks must stop.
        found = [each for each in self.world.context.gather_plain(own) if each is not None]
        if found:
            raise UsageError(
                f"--context {self.world.context_size}: the loss of a worker's part is a mean over "
                f"{found[0][0]:g} items, but the part has {found[0][1]:g} labels. The label of a "
                "part's last token belongs to the next worker's part, so compute_loss must not "
                "shift labels. Let the model shift them: return model(**inputs).loss."
            )

    def _items_of(self, kwargs: dict[str, Any]) -> LossItems | None:
        return self.items


class StepItems:
    """Counts the items in each batch of a step of `trainer`, and their total.

    `items_of` is the script's function that counts the items of a batch, or None.
    """

    def __init__(self, trainer: Any, items_of: ItemsOf | None) -> None:
        self._trainer = trainer
        self._items_of = items_of
        self._items: list[tuple[Any, Tensor, SplitBatch | None]] = []
        """The batches of the step, kept alive so that no other batch gets their id. With
        `--context`, also this rank's part of each."""
        self._total = torch.zeros(())
        self._losses: list[Tensor] = []
        """For each evaluation batch, (2,) in fp64: the loss times its items, and the items."""
        self._evaluated_loader: Any = None
        """The loader of the running evaluation, if Accelerate prepared it."""
        self.items_of_evaluated: Tensor | None = None
        """Number of items, at least 1, in the current evaluation batch."""

    def window(
        self,
        read: Callable[..., tuple[list[Any], Any]],
        batches: Iterator[Any],
        count: int,
        device: torch.device,
    ) -> tuple[list[Any], Tensor]:
        """Read the batches of a step with the trainer's own `read`, and drop repeated samples.

        Returns the batches, and the total number of items on all workers. Collective.
        """
        samples: dict[int, int] = {}

        def cut() -> Iterator[Any]:
            state = self._trainer.accelerator.gradient_state
            for batch in batches:
                shown, counted = self._cut(batch, state.active_dataloader)
                samples[id(shown)] = counted.samples
                yield shown

        with self._means_of_one_batch():
            found, _ = read(cut(), count, device)
        self._items = []
        for batch in found:
            # The user's own `read` may have replaced a batch. In that case all of its rows count.
            rows = samples[id(batch)] if id(batch) in samples else find_batch_size(batch)
            part = self._part(batch)
            self._items.append((batch, self._number(batch, rows, device, part), part))
        zero = torch.zeros((), dtype=torch.float64, device=device)
        own = sum((items for _, items, _ in self._items), zero)
        self._total = self._trainer.accelerator.reduce(own, "sum")
        return found, self._total

    def _cut(self, batch: Any, loader: Any) -> tuple[Any, CountedBatch]:
        """Return `batch` and its counts. Drops the repeated rows of the loader's last batch."""
        if loader is None:  # Accelerate did not prepare the loader, so it repeats no samples
            return batch, CountedBatch(find_batch_size(batch), is_cut=False)
        return last_batch(loader, batch, self._trainer.accelerator.world, cuts=True)

    def _part(self, batch: Any) -> SplitBatch | None:
        """Return this rank's part of the sequences of `batch`, or None if they are not split."""
        # Without an engine, attention does not exchange tokens, so an evaluation is not split.
        accelerator = self._trainer.accelerator
        is_split = accelerator.sequences is not None and accelerator.is_trained(self._trainer.model)
        return accelerator.sequences.split(batch) if is_split else None

    def _number(
        self,
        batch: Any,
        samples: int,
        device: torch.device,
        part: SplitBatch | None,
        *,
        evaluates: bool = False,
    ) -> Tensor:
        """Return the number of items in `batch` or, with `--context`, in this rank's `part`."""
        items: Any = samples
        if samples and self._items_of is not None:
            items = self._items_of(batch if part is None else part.values)
        elif part is not None and evaluates and not {"labels", "shift_labels"} & batch.keys():
            items = 0  # a prediction without labels has no loss
        elif samples:
            items = self._labels(batch, samples, part)
        return torch.as_tensor(items, dtype=torch.float64, device=device).detach().reshape(())

    def _labels(self, batch: Any, samples: int, part: SplitBatch | None) -> Any:
        """Return the number of labels other than -100.

        If `batch` has no class labels, return `samples`. With `--context`, raise UsageError.
        """
        shifted = "shift_labels" in batch
        labels = batch["shift_labels"] if shifted else batch.get("labels")
        if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.ndim == 0:
            if part is not None:
                raise UsageError(
                    "--context: this batch has no class labels, so it is unknown over how many "
                    "items of this worker's part the loss is a mean. Pass a function that counts "
                    "the items of a part: exact_mean=lambda part: ..."
                )
            return samples
        if not shifted and labels.ndim > 1 and self._shifts_labels():
            labels = nn.functional.pad(labels[..., 1:], (0, 1), value=IGNORED)
        if part is not None:
            # The label of a part's last token is the first one of the next part.
            labels = self._trainer.accelerator.sequences.part_of(labels)
        return labels.ne(IGNORED).sum()

    def _shifts_labels(self) -> bool:
        """Return whether the loss leaves out the first label of each row.

        The trainer decides this by the name of the model class. Its rule misses models such as
        GPT2LMHeadModel, and is wrong for models such as BartForCausalLM.
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
    def micro_batch(self, batch: Any) -> Iterator[tuple[Any, Tensor, Callable[[Tensor], Tensor]]]:
        """Context manager for a loss that is a mean over `batch`. Weights it by the item count.

        Yields the batch for the model (with `--context`, this rank's part), its number of items,
        and a function. The function converts the loss to its part of the step's loss, which the
        trainer averages over the workers.
        """
        found = [(items, split) for known, items, split in self._items if known is batch]
        if not found:
            raise UsageError(
                "With exact_mean=True the weight of this batch is unknown: training_step was "
                "called with a batch that get_batch_samples has not returned. Change batches in "
                "the data_collator or in _prepare_inputs."
            )
        ((items, split),), total = found, self._total
        accelerator = self._trainer.accelerator
        workers = accelerator.world.size

        def part(loss: Tensor) -> Tensor:
            return torch.where(items > 0, loss * (items / total * workers), 0.0).to(loss.dtype)

        accelerator.items = LossItems(items, same_items=False)
        if split is not None:
            batch = accelerator.sequences.show(split, split.rows, training=True)
        try:
            with self._means_of_one_batch():
                yield batch, items.clamp(min=1), part
        finally:
            accelerator.items = None

    # -- an evaluation ----------------------------------------------------------------------

    def begin_evaluation(self, loader: Any) -> None:
        self._losses.clear()
        is_prepared = hasattr(loader, "end_of_dataloader")
        self._evaluated_loader = loader if is_prepared else None

    def evaluate_batch(self, step: Callable[..., Any], model: Any, batch: Any, *how: Any) -> Any:
        """Run the trainer's `step` on an evaluation batch, and add the batch's loss to the mean.

        If any rank's batch has repeated samples, all ranks recompute the loss without them.
        Collective.
        """
        device = self._trainer.args.device
        shown, given = self._cut(batch, self._evaluated_loader)
        part = shown_part = self._part(shown)
        items = whole = self._number(shown, given.samples, device, shown_part, evaluates=True)
        if given.is_cut:
            part = self._part(batch)
            whole = self._number(batch, find_batch_size(batch), device, part, evaluates=True)
        with self._item_count_set(whole):
            found = step(model, self._shown(batch, part), *how)
        loss = found[0]
        if self._trainer.accelerator.world.any(given.is_cut):
            with self._item_count_set(items):
                loss = step(model, self._shown(shown, shown_part), True, *how[1:])[0]
        if loss is not None:
            loss = torch.where(items > 0, loss.to(device, torch.float64) * items, 0.0)
            self._losses.append(torch.stack([loss, items]))
        return found if part is None else self._joined(found, whole)

    def _shown(self, batch: Any, part: SplitBatch | None) -> Any:
        if part is None:
            return batch
        return self._trainer.accelerator.sequences.show(part, part.rows, training=False)

    def _joined(self, found: Any, items: Tensor) -> Any:
        """Combine the loss, logits and labels of all parts into those of the full sequences.

        This rank's part has `items` items. Collective.
        """
        accelerator = self._trainer.accelerator
        loss, *others = found
        if loss is not None:
            own = [float(torch.where(items > 0, loss * items, 0.0)), float(items)]
            parts = accelerator.world.context.gather_plain(own)
            total, count = (sum(each) for each in zip(*parts, strict=True))
            loss = torch.full_like(loss, total / max(count, 1))
        return loss, *accelerator.sequences.whole(others)

    @contextmanager
    def _item_count_set(self, items: Tensor) -> Iterator[None]:
        """Context manager that passes `items` to the model as the number of items."""
        self.items_of_evaluated = items.clamp(min=1)
        try:
            with self._means_of_one_batch():
                yield
        finally:
            self.items_of_evaluated = None

    def mean_of_evaluation(self) -> float | None:
        """Return the mean loss over all workers' items, or None if there are no losses.

        Collective.
        """
        if not self._losses:
            return None
        total, items = self._trainer.accelerator.reduce(torch.stack(self._losses).sum(0), "sum")
        return float(total / items)

    @contextmanager
    def _means_of_one_batch(self) -> Iterator[None]:
        """Context manager that makes the trainer use each batch's own mean.

        The trainer then does not sum items over workers, and does not divide losses by the number
        of accumulation steps.
        """
        trainer, arguments = self._trainer, self._trainer.args
        before = arguments.average_tokens_across_devices, trainer.loss_is_scaled_for_ga
        arguments.average_tokens_across_devices, trainer.loss_is_scaled_for_ga = False, True
        try:
            yield
        finally:
            arguments.average_tokens_across_devices, trainer.loss_is_scaled_for_ga = before
