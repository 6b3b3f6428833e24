"""Learns from earlier backwards which gradients will arrive.

A bucket starts once as many gradients have arrived as in earlier backwards. So an unused parameter
does not delay its bucket until backward ends.
"""

from __future__ import annotations

from collections.abc import Iterable

PATIENCE = 8
"""After this many backwards without a gradient, buckets no longer wait for a parameter."""


class ExpectedGradients:
    """Counts gradients by parameter, and remembers how many arrive in a backward."""

    def __init__(self, count: int) -> None:
        self.arrivals = [0] * count
        """By parameter, its gradients in this backward; reentrant checkpointing makes several."""
        self._learned = [0] * count
        self._absent: dict[int, int] = {}
        """By parameter, the number of backwards since its last gradient, if it is expected."""

    def begin(self) -> None:
        """Start a backward."""
        self.arrivals = [0] * len(self._learned)

    def unforeseen(self) -> list[int]:
        """Return the parameters that had more gradients in this backward than in earlier ones."""
        pairs = zip(self.arrivals, self._learned, strict=True)
        return [index for index, (now, before) in enumerate(pairs) if now > before]

    def learn(self, indices: Iterable[int]) -> bool:
        """Remember how many gradients the parameters `indices` had in this backward.

        Stops expecting parameters without a gradient in PATIENCE backwards. Returns whether
        expectations may have changed.
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
        """Return how many gradients to expect for the parameters `indices` in a backward."""
        return sum(self._learned[index] for index in indices)
