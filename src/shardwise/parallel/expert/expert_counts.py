"""Counts how many token copies each expert of a layer processes in a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence


class ExpertCounts(tuple[int, ...]):
    """The number of token copies that each expert of a layer has processed.

    Example:
        >>> from shardwise.engine import ExpertCounts
        >>> counts = ExpertCounts([30, 10, 0, 0])
        >>> round(counts.entropy, 3), counts.imbalance
        (0.406, 3.0)
    """

    @property
    def entropy(self) -> float:
        """Entropy of the experts' shares, divided by its maximum, log E.

        It is 1 if all experts process equally many tokens, 0 if one expert processes all of them,
        and NaN if there are no tokens.
        """
        total = sum(self)
        if not total:
            return math.nan
        if len(self) == 1:
            return 1.0
        shares = [count / total for count in self if count]
        return -sum(share * math.log(share) for share in shares) / math.log(len(self))

    @property
    def imbalance(self) -> float:
        """The largest count divided by the mean count. At least 1, or NaN without any tokens."""
        return max(self) * len(self) / sum(self) if sum(self) else math.nan


class StepCounts:
    """Counts this rank's token copies per expert, in forward passes that have a backward pass.

    Evaluation passes are not counted, and a recomputed forward pass is not counted again.

    Args:
        number: Number of experts.
    """

    def __init__(self, number: int) -> None:
        self.values = [0] * number

    def counter(self, own: Sequence[int], *, training: bool) -> Callable[[], None]:
        """Return a function that adds the counts `own` once.

        If `training` is false, the function does nothing.
        """
        # A second pass through the same graph (--guard, several losses) must not count again.
        rest = [own] if training else []

        def count() -> None:
            if rest:
                self.add(rest.pop())

        return count

    def add(self, own: Sequence[int]) -> None:
        """Add the counts `own`."""
        self.values = [a + b for a, b in zip(self.values, own, strict=True)]

    def clear(self) -> None:
        self.values = [0] * len(self.values)
