"""What a Horovod script trains on, counted for `shardwise scale`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

from shardwise.step_log import StepLog


@dataclass(frozen=True)
class Outcome:
    """Of a step, whose loss only the script knows."""

    loss: float = math.nan
    weight: float = 0.0


class Samples:
    """Counts what torch's DataLoaders give, while it is open; what they give under
    torch.no_grad() is to evaluate on, and does not count."""

    def __init__(self, log: StepLog) -> None:
        self._log = log
        self._plain: Any = DataLoader.__iter__
        self._counting: Any = lambda loader: self._counted(self._plain(loader))
        DataLoader.__iter__ = self._counting  # type: ignore[method-assign, assignment]

    def close(self) -> None:
        """Count no longer."""
        if DataLoader.__iter__ is self._counting:
            DataLoader.__iter__ = self._plain  # type: ignore[method-assign]

    def stepped(self, steps: int) -> None:
        """Step number `steps` is made. Raises SystemExit when the run is to end."""
        self._log.stepped(0, steps, Outcome())

    def _counted(self, batches: Iterator[Any]) -> Iterator[Any]:
        in_hand = False
        try:
            if torch.is_grad_enabled():
                self._log.began()
            for batch in batches:
                if in_hand := torch.is_grad_enabled():
                    self._log.given(_rows(batch))
                yield batch
                in_hand = False
                if torch.is_grad_enabled():
                    self._log.asked()
        finally:
            self._log.closed(in_hand=in_hand)


def _rows(batch: Any) -> int:
    """The length of its first tensor."""
    tensors = (leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim)
    return next((len(tensor) for tensor in tensors), 0)
