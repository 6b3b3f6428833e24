"""The exact mean: the gradient of the mean over all items of all workers and micro-batches.

Each rank's loss is a mean over `weight` items. Backward is seeded with weight / divisor, so that
gradients add up to weighted sums over micro-batches and ranks; the total weight travels beside
them, and one division in the update makes them the mean. The divisor is a power of two near the
total weight (so dividing by it is exact, and 16-bit gradients stay in range), over the loss scale.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shardwise.collectives import Collectives
from shardwise.errors import UsageError
from shardwise.feed import Batch
from shardwise.model.precision import LossScale


def weight_of(given: float | Tensor | None, batch: Batch | None) -> float | Tensor:
    """The weight of a loss: a float, or a 0-dim tensor where it lives on a GPU.

    A stand-in weighs nothing whatever is `given`; without that, the samples of `batch` count.
    """
    if batch is not None and batch.samples == 0:
        return 0.0
    if given is None:
        return float(batch.samples) if batch is not None else 1.0
    if isinstance(given, Tensor):
        if given.numel() != 1:
            shape = tuple(given.shape)
            raise UsageError(f"weight takes one number, not a tensor of shape {shape}.")
        if given.device.type != "cpu":
            return given.detach().reshape(())
        given = given.item()
    if not 0 <= given < math.inf:
        raise UsageError(f"weight takes a number of 0 or more, not {given}.")
    return float(given)


class Seeds:
    """The seeds of backward, and what undoes them; alike on all ranks."""

    def __init__(self, scale: LossScale, group: Collectives) -> None:
        self._scale = scale
        self._group = group
        self._exponent: int | None = None

    def seed(self, loss: Tensor, weight: float | Tensor) -> Tensor:
        """What backward of `loss` starts from. The first call is collective."""
        if self._exponent is None:
            row = torch.as_tensor(weight, dtype=torch.float64, device=self._group.small_device)
            self.follow(float(self._group.gather_rows(row.reshape(1)).sum()))
        seed = torch.as_tensor(weight, dtype=loss.dtype, device=loss.device)
        return seed.div(self._divisor).view_as(loss)

    def divisor(self, total_weight: float) -> float:
        """What the summed gradients are to be divided by to be the mean."""
        return total_weight / self._divisor

    def follow(self, total_weight: float) -> None:
        """Take the power of two near the last step's total weight for the next."""
        self._exponent = round(math.log2(total_weight)) if total_weight > 0 else 0

    @property
    def _divisor(self) -> float:
        return math.ldexp(1.0, self._exponent or 0) / self._scale.value
