"""Measures the phases of each step on this rank, and finds a rank that the others wait for.

    data       from the end of a step, or of a backward pass, to the next forward pass
    forward    to the start of the backward pass, with the loss
    backward   to its end
    update     engine.step

The time in which this rank waits for others counts for no phase. Otherwise all ranks would take the
same time, because the exchange of each step makes them equal.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

DATA, FORWARD, BACKWARD, UPDATE = PHASES = ("data", "forward", "backward", "update")

STEPS = 20
"""Number of steps whose median is compared."""

FACTOR = 1.3
"""A rank is a straggler if its steps take this many times as long as on the other ranks."""

LEAST = 0.002
"""Difference in seconds below which no rank is a straggler."""


@dataclass(frozen=True)
class Straggler:
    """A rank whose steps take longer than on the other ranks.

    Args:
        rank: The rank.
        own: Seconds per step that it takes itself.
        usual: The median of the other ranks.
        phase: The phase with most of the difference, in words.
    """

    rank: int
    own: float
    usual: float
    phase: str


class StepTimes:
    """The phases of this rank's last steps.

    Args:
        waited: Returns the seconds that this process has waited for other ranks so far.
    """

    def __init__(self, waited: Callable[[], float]) -> None:
        self._waited = waited
        self._steps: deque[list[float]] = deque(maxlen=STEPS)
        self._now = dict.fromkeys(PHASES, 0.0)
        self._phase = DATA
        self._since = time.perf_counter() - waited()

    def enter(self, phase: str) -> None:
        """End the current phase, and begin `phase`."""
        # A clock that stands still while this rank waits.
        now = time.perf_counter() - self._waited()
        self._now[self._phase] += now - self._since
        self._phase, self._since = phase, now

    def end_step(self) -> None:
        """Keep the times of the step that has just ended."""
        self.enter(DATA)
        self._steps.append(list(self._now.values()))

    def begin_step(self) -> None:
        """Begin a step. The time since `end_step` counts for none."""
        self._now = dict.fromkeys(PHASES, 0.0)
        self._since = time.perf_counter() - self._waited()

    def row(self) -> list[float]:
        """Return the median of a step, and of each phase, in seconds; 0 before STEPS steps."""
        if len(self._steps) < STEPS:
            return [0.0] * (1 + len(PHASES))
        return [median(map(sum, self._steps)), *map(median, zip(*self._steps, strict=True))]


def straggler(rows: Sequence[Sequence[float]]) -> Straggler | None:
    """Return the slowest rank if it is a straggler.

    Args:
        rows: The rows of all ranks, from `StepTimes.row`.
    """
    slowest = max(range(len(rows)), key=lambda rank: rows[rank][0])
    others = [row for rank, row in enumerate(rows) if rank != slowest]
    if not all(row[0] for row in rows) or not others:
        return None
    own, usual = rows[slowest][0], median(row[0] for row in others)
    if own < FACTOR * usual or own - usual < LEAST:
        return None
    typical = [median(column) for column in zip(*others, strict=True)]
    excess = [mine - theirs for mine, theirs in zip(rows[slowest], typical, strict=True)][1:]
    phase = PHASES[excess.index(max(excess))]
    # Without hooks on a compiled model, its forward pass is not told apart from what precedes it.
    if phase == DATA and not rows[slowest][1 + PHASES.index(FORWARD)]:
        phase = f"{DATA} or {FORWARD}"
    return Straggler(slowest, own, usual, phase)
