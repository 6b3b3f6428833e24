"""Implements `exact_mean=True`: every sample of a step counts once, as in a single process.

Libraries repeat samples at the end of an epoch until every rank has the same number. With
`exact_mean=True`, a rank drops the repeated rows of its batches. A batch that contains only
repeated rows is left unchanged, because every rank must run the same number of forward passes. Its
loss gets weight 0:

    9 samples, batches of 2, 2 ranks     rank 0           rank 1
    the library's batches                0 2 | 4 6 | 8    1 3 | 5 7 | 0
    with exact_mean=True                 0 2 | 4 6 | 8    1 3 | 5 7 | 0, of weight 0

Each bridge finds the rows that its library repeats, in accelerate/repeated_samples.py and
lightning/sharing.py. transformers/exact_mean.py also counts labels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from shardwise.bridging.trained_engine import LossItems
from shardwise.errors import UsageError

ItemsOf = Callable[[Any], Any]
"""Returns the number of items in a batch that its loss averages over."""


@dataclass(frozen=True, eq=False)
class CountedBatch:
    """A batch as the script receives it.

    `samples` is the number of rows that are not repeated, possibly 0.
    """

    samples: int
    is_cut: bool
    """True if repeated rows were dropped, or if all rows are repeated."""
    has_repeated: bool = False
    """True if the batch still contains rows of samples that were counted before."""
    is_evaluated: bool = False
    """True if the batch was read for an evaluation, and its sequences were split (`--context`)."""


class CountedBatches:
    """The last batch of each open loader.

    It assumes that the next loss is computed from one of these batches.

    Args:
        loaders: Name of the loaders in messages ("prepared loader").
        call: Name of the backward call in messages ("accelerator.backward").
        items_of: Counts the items of a batch, if a loss is not a mean over samples.
    """

    def __init__(self, loaders: str, call: str, items_of: ItemsOf | None = None) -> None:
        self._loaders = loaders
        self.reads_loss = False
        """True to let the engine read from the loss over how many items it is a mean."""
        self._advice = f"Write {call}(loss, weight=number_of_items_that_the_loss_averages)."
        self.items_of = items_of
        self._open: dict[int, CountedBatch] = {}
        """The last batch of each loader that is being iterated over, by the id of the loader."""
        self.last: CountedBatch | None = None
        self.last_rows: Any = None
        """The contents of `last`, if `items_of` or a subclass needs them.

        Otherwise None, to free them.
        """

    def iterate(
        self,
        loader: Any,
        batches: Iterator[Any],
        count: Callable[[int, Any], tuple[Any, CountedBatch]],
    ) -> Iterator[Any]:
        """Yield the batches of `loader` to the script.

        `count(number, batch)` returns the batch to yield, and its CountedBatch.
        """
        try:
            for number, batch in enumerate(batches):
                shown, counted = count(number, batch)
                self._open[id(loader)] = self.last = counted
                yield shown
        finally:
            # Do not clear `last`, because the loss of the last batch may be computed after the
            # loop.
            self._open.pop(id(loader), None)

    @property
    def is_open(self) -> bool:
        """True while a loop over a loader is running."""
        return bool(self._open)

    def items(self, number: float | Tensor | None, same_items: bool | None) -> LossItems:
        """Return the items of a loss: `number` items or, if it is None, those of the loss's batch.

        A batch that contains only repeated samples has 0 items.
        """
        if number is not None:
            rows = None if self.last is None else self.last.samples
            return LossItems(0.0 if rows == 0 else number, same_items=same_items, rows=rows)
        batch = self.batch_of_loss()
        counted: Any = None if self.reads_loss else batch.samples
        if self.items_of is not None:
            counted = self.items_of(self.last_rows) if batch.samples else 0.0
        return LossItems(counted, batch, same_items, rows=batch.samples)

    def batch_of_loss(self) -> CountedBatch:
        """Return the batch that the current loss was computed from.

        Raises UsageError if the batch is ambiguous, or if it has repeated samples.
        """
        batches = list(self._open.values()) or ([self.last] if self.last else [])
        if not batches:
            raise UsageError(
                f"With exact_mean=True the weight of this loss is unknown, because no "
                f"{self._loaders} has returned a batch. {self._advice}"
            )
        if len({each.samples for each in batches}) > 1:
            sizes = " and ".join(str(each.samples) for each in batches)
            raise UsageError(
                f"The weight of this loss is ambiguous: open loaders have returned batches of "
                f"{sizes} samples. {self._advice}"
            )
        if batches[-1].has_repeated:
            raise UsageError(
                "This batch has repeated samples. exact_mean=True drops them only while a model is "
                "in training mode: write model.train() before the loop."
            )
        if all(each.is_evaluated for each in batches):
            # The engine would count the labels of the training batch before it.
            raise UsageError(
                "--context: this batch was read while no model was in training mode, so its parts "
                "are those of an evaluation: write model.train() before the loop."
            )
        return batches[-1]


def items_of_loss(
    batches: CountedBatches | None, keywords: dict[str, Any], call: str, setting: str
) -> LossItems | None:
    """Pop `weight` and `same_items` from the keywords of a backward call. Return the loss's items.

    Without `exact_mean=True`, returns None, or raises UsageError if a weight was passed.
    """
    number, same = keywords.pop("weight", None), keywords.pop("same_items", None)
    if batches is not None:
        return batches.items(number, same)
    if number is None and same is None:
        return None
    raise UsageError(
        f"{call}(loss, weight=...) has an effect only with {setting}. Without it, the losses of "
        "the workers are averaged with equal weights. Set it, or leave weight= out."
    )
