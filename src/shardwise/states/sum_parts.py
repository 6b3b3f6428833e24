"""Where the parts of a step's sum come together.

Usually each part is added to those before. In the exact mode parts are joined in a fixed tree,
level by level, so that what is added to what does not depend on how many ranks there are:

    parts       1   2   3   4          fan-ins [2, 2]
    levels[0]   1 + 2   3 + 4
    levels[1]       └─ + ─┘            the sum of the step
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from shardwise.collectives import Handle
from shardwise.states.storage import Held


class Tally:
    """One bucket's sum in the making; `device` is where its parts come from.

    Level i joins `fan_ins[i]` parts of the level below, and the last one all that come to it.
    """

    def __init__(
        self, levels: Sequence[Held], fan_ins: Sequence[int], device: torch.device
    ) -> None:
        assert len(levels) == max(len(fan_ins), 1)
        self.levels = list(levels)
        self._fan_ins = fan_ins
        self._device = device
        self._counts = [0] * len(levels)

    @property
    def total(self) -> Held:
        """The sum, once all parts of a step have come."""
        return self.levels[-1]

    @property
    def nbytes(self) -> int:
        """Bytes of all levels, where they rest."""
        return sum(level.nbytes for level in self.levels)

    @property
    def complete(self) -> bool:
        """Whether all parts of a step have come, as far as can be told."""
        return not self._fan_ins or self._counts[-1] == self._fan_ins[-1]

    def take(self, part: Tensor) -> tuple[Tensor | None, Handle]:
        """Add the next part, of the interval's length; returns what `Held.add` does."""
        told, read = self.levels[0].add(part, fresh=self._counts[0] == 0)
        self.arrived()
        return told, read

    def arrived(self) -> None:
        """The next part lies in the lowest level already; join what is complete."""
        self._counts[0] += 1
        for index, (lower, upper) in enumerate(pairwise(self.levels)):
            if self._counts[index] < self._fan_ins[index]:
                return
            _, read = upper.add(lower.loaded().to(self._device), fresh=self._counts[index + 1] == 0)
            read.reusable()
            self._counts[index] = 0
            self._counts[index + 1] += 1

    def clear(self) -> None:
        """Forget the parts of this step."""
        self._counts = [0] * len(self.levels)

    def widen(self) -> None:
        """Let the sum rest in fp32."""
        assert len(self.levels) == 1, "the levels of a tree are wide"
        self.levels = [self.total.widened()]
