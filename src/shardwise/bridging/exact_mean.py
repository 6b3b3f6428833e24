"""`exact_mean=True`: every sample of a step counts once, as in one process with the whole batch.

Libraries repeat samples at the end of an epoch until every rank has the same number. Here a rank
drops the repeated rows of its batches. A batch of repeated rows alone stays whole, because every
rank must make the same forwards; its loss has weight 0:

    9 samples, batches of 2, 2 ranks     rank 0           rank 1
    the library's batches                0 2 | 4 6 | 8    1 3 | 5 7 | 0
    with exact_mean=True                 0 2 | 4 6 | 8    1 3 | 5 7 | 0, of weight 0

Each bridge finds the rows that its library repeats: accelerate/repeated_samples.py,
lightning/sharing.py. transformers/exact_mean.py counts labels on top of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from shardwise.bridging.trained_engine import LossItems
from shardwise.errors import UsageError

ItemsOf = Callable[[Any], Any]
"""Returns the number of items that the loss of a batch is a mean over."""


@dataclass(frozen=True, eq=False)
class CountedBatch:
    """A batch as the script gets it; `samples` of its rows count, 0 if none does."""

    samples: int
    is_cut: bool
    """Whether repeated rows were dropped, or no row counts."""
    has_repeated: bool = False
    """Whether the batch still has rows of samples that counted before."""


class CountedBatches:
    """Remembers the last batch of each open loader, which the next loss is computed from.

    Args:
        loaders: what messages call the loaders ("prepared loader")
        call: what messages call the backward ("accelerator.backward")
        items_of: counts the items of a batch, if a loss is not a mean over samples
    """

    def __init__(self, loaders: str, call: str, items_of: ItemsOf | None = None) -> None:
        self._loaders = loaders
        self._advice = f"Write {call}(loss, weight=number_of_items_the_loss_is_a_mean_over)."
        self.items_of = items_of
        self._open: dict[int, CountedBatch] = {}
        """The last batch of each loader that is being iterated over, by id of the loader."""
        self.last: CountedBatch | None = None
        self.last_rows: Any = None
        """The content of `last`, where `items_of` or a subclass needs it; else not kept alive."""

    def iterate(
        self,
        loader: Any,
        batches: Iterator[Any],
        count: Callable[[int, Any], tuple[Any, CountedBatch]],
    ) -> Iterator[Any]:
        """Yield the batches of `loader`. `count(number, batch)` returns the batch that the script
        gets, and its counts."""
        try:
            for number, batch in enumerate(batches):
                shown, counted = count(number, batch)
                self._open[id(loader)] = self.last = counted
                yield shown
        finally:
            # `last` stays: the loss of the last batch may be computed after the loop.
            self._open.pop(id(loader), None)

    @property
    def is_open(self) -> bool:
        """Whether a loader is being iterated over."""
        return bool(self._open)

    def items(self, number: float | Tensor | None, same_items: bool | None) -> LossItems:
        """Return the items of a loss: `number` items, or the items of its batch if None.

        A batch whose samples have all counted before has no items.
        """
        if number is not None:
            rows = None if self.last is None else self.last.samples
            return LossItems(0.0 if rows == 0 else number, same_items=same_items, rows=rows)
        batch = self.batch_of_loss()
        counted: Any = batch.samples
        if self.items_of is not None:
            counted = self.items_of(self.last_rows) if batch.samples else 0.0
        return LossItems(counted, batch, same_items, rows=batch.samples)

    def batch_of_loss(self) -> CountedBatch:
        """Return the batch that a loss is computed from. Raises UsageError if it is ambiguous, or
        has no weight."""
        batches = list(self._open.values()) or ([self.last] if self.last else [])
        if not batches:
            raise UsageError(
                f"exact_mean=True, and no {self._loaders} has given a batch: the weight of this "
                f"loss is unknown. {self._advice}"
            )
        if len({each.samples for each in batches}) > 1:
            sizes = " and ".join(str(each.samples) for each in batches)
            raise UsageError(
                f"Open loaders have given batches of {sizes} samples, so the weight of this loss "
                f"is ambiguous. {self._advice}"
            )
        if batches[-1].has_repeated:
            raise UsageError(
                "This batch is filled with repeated samples, which exact_mean=True drops only "
                "while a model trains: write model.train() before the loop."
            )
        return batches[-1]


def items_of_loss(
    batches: CountedBatches | None, keywords: dict[str, Any], call: str, setting: str
) -> LossItems | None:
    """Pop `weight` and `same_items` from the `keywords` of a backward; return what its loss is a
    mean over, or None without exact means. Raises UsageError for a weight without them."""
    number, same = keywords.pop("weight", None), keywords.pop("same_items", None)
    if batches is not None:
        return batches.items(number, same)
    if number is None and same is None:
        return None
    raise UsageError(
        f"{call}(loss, weight=...) counts with {setting} only: without it, the losses of the "
        "workers are averaged, whatever they are means of."
    )
