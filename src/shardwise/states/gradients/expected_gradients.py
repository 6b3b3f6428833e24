"""Predicts from earlier backward passes which gradients will arrive.

A bucket is launched once it has received as many gradients as in earlier backward passes. An unused
parameter therefore does not delay its bucket until the backward pass ends.
"""

from __future__ import annotations

from collections.abc import Iterable

PATIENCE = 8
"""After this many backward passes without a parameter's gradient, its bucket no longer waits."""


class ExpectedGradients:
    """Counts each parameter's gradients, and learns how many to expect per backward pass."""

    def __init__(self, count: int) -> None:
        self.arrivals = [0] * count
        """Number of gradients of each parameter in this backward pass. Reentrant checkpointing
        produces several per parameter."""
        self._learned = [0] * count
        self._absent: dict[int, int] = {}
        """Parameter index -> backward passes since its last gradient, for expected parameters that
        are absent."""

    def begin(self) -> None:
        """Reset the counts at the start of a backward pass."""
        self.arrivals = [0] * len(self._learned)

    def unforeseen(self) -> list[int]:
        """Return the indices of parameters that have more gradients in this pass than expected."""
        pairs = zip(self.arrivals, self._learned, strict=True)
        return [index for index, (now, before) in enumerate(pairs) if now > before]

    def learn(self, indices: Iterable[int]) -> bool:
        """Learn from this backward pass how many gradients to expect for the parameters `indices`.

        Stops expecting a parameter after PATIENCE backward passes without its gradient. Returns
        whether expectations may have changed.
        """
        if self.arrivals == self._learned and not self._absent:
            return False
        for index in indices:
            count = self.arrivals[index]
            if count:
                self._absent.pop(index, None)
                self._learned[index] = max(self._learned[index], count)
            elif self._learned[index]:
                self._absent[index] = self._absent.get(index, 0) + 1
                if self._absent[index] >= PATIENCE:
                    self._learned[index] = 0
                    del self._absent[index]
        return True

    def count(self, indices: Iterable[int]) -> int:
        """Return the number of gradients expected per backward pass for `indices`."""
        return sum(self._learned[index] for index in indices)
