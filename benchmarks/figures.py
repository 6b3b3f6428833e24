"""From raw moments to the figures of a table: pure arithmetic."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

AGREE = 1e-4
"""Losses that differ by less are the same work: equal to 4 decimals."""


@dataclass
class Line:
    """What one contender showed; `note` says why there is nothing to show.

    `rounds` are ms per timed step, by round. `losses` are means over the ranks, by step, of the
    first round. Memory is in bytes per rank: after the imports, between steps, and at the highest
    moment within a step. `device` is what else was seen of a device, per step, by name.
    """

    key: str
    label: str
    rounds: list[list[float]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    empty: float | None = None
    resident: float | None = None
    peak: float | None = None
    note: str = ""
    device: dict[str, Any] = field(default_factory=dict)

    @property
    def per_round(self) -> list[float]:
        return [median(steps) for steps in self.rounds]

    @property
    def median(self) -> float | None:
        """The median over the rounds of each round's median step."""
        return median(self.per_round) if self.rounds else None

    @property
    def fastest(self) -> float | None:
        return min(min(steps) for steps in self.rounds) if self.rounds else None


def step_times(ends: Sequence[Sequence[int]]) -> list[float]:
    """ms from the moment the last rank ended a step to the moment the last one ended the next.

    `ends[rank][i]` is in ns. The first step only starts the clock, so there is one figure less
    than there are steps; no barrier is added between them, as a user's loop has none.
    """
    fronts = [max(moments) for moments in zip(*ends, strict=True)]
    return [(b - a) / 1e6 for a, b in pairwise(fronts)]


def update_times(updates: Sequence[Sequence[Sequence[int]]]) -> list[float]:
    """ms from the moment the last rank began an update to the moment the last one ended it.

    `updates[rank][i]` is (begun, ended, ...) in ns.
    """
    steps = zip(*updates, strict=True)
    return [(max(u[1] for u in step) - max(u[0] for u in step)) / 1e6 for step in steps]


def mean_losses(losses: Sequence[Sequence[float]]) -> list[float]:
    """The loss of the whole batch by step; ranks hold equal shares of it."""
    return [sum(row) / len(row) for row in zip(*losses, strict=True)]


def ratio(line: Line, other: Line | None, scale: float = 1.0) -> float | None:
    """`line` over `scale` x `other`, round by round, and then the median.

    The two ran seconds apart in a round, so a machine that slows down for a minute slows both,
    and their ratio moves less than either time.
    """
    if other is None or not line.rounds or not other.rounds:
        return None
    pairs = zip(line.per_round, other.per_round, strict=False)
    return median(a / (b * scale) for a, b in pairs)


def limit_scale(ranks: int, cores: int) -> float:
    """What part of one process's step remains when all cores that the ranks can use share it."""
    return 1.0 / min(ranks, cores)


def disagreement(lines: Sequence[Line]) -> float:
    """The largest difference between two contenders' losses at the same step."""
    shown = [line.losses for line in lines if line.losses]
    return max((max(at) - min(at) for at in zip(*shown, strict=False)), default=0.0)
