"""From raw moments to the figures of a table: pure arithmetic."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

AGREE = 1e-4
"""Losses on CPUs in fp32 that differ by less are equal to 4 decimals: the work was the same."""


@dataclass
class Line:
    """The figures of one contender; `note` says why it has no figures.

    `rounds` are ms per timed step, by round. `losses` are means over the ranks, by step, of the
    first round. Memory is in bytes per rank: after the imports, between steps, and at the highest
    moment within a step. `device` has further figures of a GPU, per step, by name.
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
    """Return ms from the moment the last rank ended a step to the moment it ended the next.

    `ends[rank][i]` is in ns. The first step only starts the clock, so there is one figure less
    than there are steps. No barrier is added between steps, because a user's loop has none.
    """
    fronts = [max(moments) for moments in zip(*ends, strict=True)]
    return [(b - a) / 1e6 for a, b in pairwise(fronts)]


def mean_losses(losses: Sequence[Sequence[float]]) -> list[float]:
    """Return the loss of the whole batch by step; ranks hold equal shares of it."""
    return [sum(row) / len(row) for row in zip(*losses, strict=True)]


def ratio(line: Line, other: Line | None, scale: float = 1.0) -> float | None:
    """Return `line` over `scale` x `other`, round by round, and then the median.

    The two ran seconds apart in a round, so a machine that slows down for a minute slows both,
    and their ratio moves less than either time.
    """
    if other is None or not line.rounds or not all(other.per_round):
        return None
    pairs = list(zip(line.per_round, other.per_round, strict=False))
    return median(a / (b * scale) for a, b in pairs) if pairs else None


def limit_scale(ranks: int, cores: int) -> float:
    """Return the part of one process's step that remains if all usable cores share it."""
    return 1.0 / min(ranks, cores)


COMPARED = 10
"""Number of losses that are compared. On random tokens, AdamW without a warm-up amplifies rounding:
in results/2026-11-27-gpu-first.json, the losses of plain PyTorch and of Accelerate, which compute
the same, differ by 0.5 at the 28th step."""


def disagreement(lines: Sequence[Line]) -> float:
    """Return the largest difference between two contenders' losses at the same step."""
    shown = [line.losses[:COMPARED] for line in lines if line.losses]
    return max((max(at) - min(at) for at in zip(*shown, strict=False)), default=0.0)


def add_device_figures(
    line: Line, steps: int, told: list[dict[str, Any]], seen: list[dict[str, Any]]
) -> None:
    """Write the figures of `steps` traced steps into a line, per step.

    `told` are the ranks' own figures, `seen` the counts of their profiles. Of each figure the
    highest of all ranks counts.
    """
    line.peak = max((each["peak"] for each in told if "peak" in each), default=None)
    for name in ("launches", "synchronisations"):
        counts = [each[name] for each in seen if each[name] is not None]
        line.device[name] = max(counts) / steps if counts else None
    if why := next((each["why_not"] for each in seen if each.get("why_not")), ""):
        line.device["not_profiled"] = why
    for way in ("up", "down"):
        copies = max((each["copies"][way] for each in seen), key=lambda c: c["nbytes"] or 0)
        nbytes, took = copies["nbytes"], copies["took"]
        line.device[way] = {
            "copies": copies["count"] / steps,
            "bytes": None if nbytes is None else nbytes / steps,
            "gb_per_s": nbytes / took / 1e3 if nbytes and took else None,
            "hidden": copies["hidden"],
        }
