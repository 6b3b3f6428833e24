"""Remembers what loaders gave last: how many samples a loss of it is a mean over."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from shardwise.bridging.trained_engine import LossItems
from shardwise.errors import UsageError


@dataclass(frozen=True, eq=False)
class Given:
    """A batch as it was handed out: `samples` of its rows count, 0 where none does."""

    samples: int
    is_cut: bool
    """Whether rows that count nothing were left out, or none of its rows counts."""
    has_repeated: bool = False
    """Whether some of its rows are of samples that have counted before."""


class GivenBatches:
    """What each loader that is iterated over gave last.

    Messages call the loaders `loaders` ("prepared loader"), and the backward `call`.
    """

    def __init__(self, loaders: str, call: str) -> None:
        self._loaders = loaders
        self._write = f"Write {call}(loss, weight=number_of_items_the_loss_is_a_mean_over)."
        self._open: dict[int, Given] = {}
        """By identity of a loader that is iterated over."""
        self.last: Given | None = None

    def note(self, loader: Any, given: Given) -> None:
        """Remember that `loader`, which is iterated over, has `given` a batch."""
        self._open[id(loader)] = self.last = given

    def end(self, loader: Any) -> None:
        """The iteration over `loader` has ended: what it gave last may still be computed with."""
        self._open.pop(id(loader), None)

    @property
    def is_open(self) -> bool:
        """Whether a loader is iterated over now."""
        return bool(self._open)

    def items(self, number: float | Tensor | None, same_items: bool | None) -> LossItems:
        """What a loss is a mean over: `number` items where the script says so, else what its graph
        says, or the samples of the batch. Nothing, where those have all counted before."""
        if number is None:
            batch = self.of_loss()
            return LossItems(batch.samples, batch, same_items, rows=batch.samples)
        rows = None if self.last is None else self.last.samples
        return LossItems(0.0 if rows == 0 else number, same_items=same_items, rows=rows)

    def of_loss(self) -> Given:
        """The batch that a loss is of. Raises UsageError where that, or its weight, cannot be
        told."""
        given = list(self._open.values()) or ([self.last] if self.last else [])
        if not given:
            raise UsageError(
                f"exact_mean=True, and no {self._loaders} has given a batch: how much a loss "
                f"weighs cannot be told. {self._write}"
            )
        if len({each.samples for each in given}) > 1:
            sizes = " and ".join(str(each.samples) for each in given)
            raise UsageError(
                f"Loaders that are open have given batches of {sizes} samples, so that the weight "
                f"of this loss cannot be told. {self._write}"
            )
        if given[-1].has_repeated:
            raise UsageError(
                "This batch has samples that are repeated to fill it, which exact_mean=True leaves "
                "out where a model trains: write model.train() before the loop."
            )
        return given[-1]
