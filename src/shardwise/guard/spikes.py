"""Finds steps whose loss or gradient norm is far above the median of recent steps."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import median

from shardwise.messages.printable import listed

LAST = 100
"""Number of recent steps over which the median is computed."""

FIRST = 20
"""Number of steps before the first comparison."""

FACTOR = 10.0
"""A spike is this many standard deviations above the median."""

LEAST = 0.05
"""Lower bound for the standard deviation, as a fraction of the median."""

MOST = 3
"""Number of consecutive spikes after which the comparison starts again.

So many spikes in a row mean that the level has changed, for example because the data or the
learning rate has. Without the restart, all later steps would be skipped."""


class Spikes:
    """The losses and gradient norms of recent steps, the same on all ranks."""

    def __init__(self) -> None:
        self._last = {"loss": deque[float](maxlen=LAST), "gradient norm": deque[float](maxlen=LAST)}
        self._spikes = 0

    def look_at(self, loss: float, grad_norm: float) -> str:
        """Record a step. If it is a spike, return a sentence that describes it, otherwise ""."""
        found = ""
        for (name, values), value in zip(self._last.items(), (loss, grad_norm), strict=True):
            if not math.isfinite(value):
                continue
            if len(values) >= FIRST and not found:
                usual = median(values)
                # 1.4826 turns a median deviation into a standard deviation of normal values.
                spread = 1.4826 * median(abs(each - usual) for each in values)
                if value - usual > FACTOR * max(spread, LEAST * abs(usual)):
                    found = (
                        f"the {name} is {value:.4g}; the median of the last {len(values)} steps is "
                        f"{usual:.4g}"
                    )
            values.append(value)
        self._spikes = self._spikes + 1 if found else 0
        if self._spikes == MOST:
            self._spikes = 0
            for values in self._last.values():
                values.clear()
            found += f", spike {MOST} in a row. Later steps are compared with the new level"
        return found


def largest_loss(reports: Sequence[tuple[float, Sequence[int]]]) -> str:
    """Describe which rank has the largest loss, and on which samples.

    A loss that is not finite counts as larger than any other.

    Args:
        reports: Each rank's loss and the indices of its samples.
    """
    order = [(not math.isfinite(loss), loss) for loss, _ in reports]
    rank = max(range(len(reports)), key=order.__getitem__)
    loss, samples = reports[rank]
    named = f"; samples {listed(samples)}" if samples else ""
    return f"The largest loss is that of rank {rank} ({loss:.4g}{named})."
