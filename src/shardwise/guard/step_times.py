"""Measures the phases of each step on this rank, and finds a rank that the others wait for.

    data       from the end of a step or a backward pass to the start of the next forward pass
    forward    from the start of the forward pass to the start of the backward pass (with the loss)
    backward   the backward pass
    update     engine.step

Time that this rank spends waiting for other ranks is excluded from all phases. Otherwise all ranks
would measure the same time, because they synchronise in every step.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from shardwise.guard.checks import SmallGroup
from shardwise.messages.printable import printable

DATA, FORWARD, BACKWARD, UPDATE = PHASES = ("data", "forward", "backward", "update")

STEPS = 20
"""Number of recent steps in a median."""

FACTOR = 1.3
"""A rank is a straggler if its steps take this many times as long as the steps of other ranks."""

LEAST = 0.002
"""Difference in seconds below which no rank is a straggler."""


@dataclass(frozen=True)
class Straggler:
    """A rank whose steps take longer than the steps of the other ranks.

    Args:
        rank: The rank.
        own: Seconds per step, excluding waits for other ranks.
        usual: The median of the other ranks' seconds per step.
        phase: The phase that accounts for most of the difference, in words.
    """

    rank: int
    own: float
    usual: float
    phase: str


class StepTimes:
    """The duration of each phase in this rank's recent steps.

    Args:
        waited: Returns the total time in seconds that this process has waited for other ranks.
    """

    def __init__(self, waited: Callable[[], float]) -> None:
        self._waited = waited
        self._steps: deque[list[float]] = deque(maxlen=STEPS)
        self._now = dict.fromkeys(PHASES, 0.0)
        self._phase = DATA
        self._since = time.perf_counter() - waited()

    def enter(self, phase: str) -> None:
        """End the current phase, and start `phase`."""
        # A clock that stands still while this rank waits.
        now = time.perf_counter() - self._waited()
        self._now[self._phase] += now - self._since
        self._phase, self._since = phase, now

    def end_step(self) -> None:
        """Store the phase times of the completed step."""
        self.enter(DATA)
        self._steps.append(list(self._now.values()))

    def begin_step(self) -> None:
        """Start a step. The time since `end_step` is not part of any step."""
        self._now = dict.fromkeys(PHASES, 0.0)
        self._since = time.perf_counter() - self._waited()

    def row(self) -> list[float]:
        """Return the median seconds per step and per phase. All are 0 until `STEPS` steps."""
        if len(self._steps) < STEPS:
            return [0.0] * (1 + len(PHASES))
        return [median(map(sum, self._steps)), *map(median, zip(*self._steps, strict=True))]


class Stragglers:
    """Names each straggler once.

    Args:
        group: Ranks whose step times are compared.
        place: This rank's host and device.
        say: Prints a line on the main rank only.
    """

    def __init__(
        self, group: SmallGroup, place: tuple[str, str], say: Callable[[str], None]
    ) -> None:
        self._group, self._place, self._say = group, place, say
        self._named: set[int] = set()

    def name(self, step: int, rows: Sequence[Sequence[float]]) -> Straggler | None:
        """Print which rank the others wait for, and return that rank if it is new.

        Collective if there is a new straggler. `rows` must be the same on all ranks.
        """
        slow = straggler(rows)
        if slow is None or slow.rank in self._named:
            return None
        self._named.add(slow.rank)
        host, device = self._group.gather_plain(list(self._place))[slow.rank]
        self._say(
            f"shardwise: guard: step {step}: the other ranks wait for rank {slow.rank} (host "
            f"{printable(host)}, {device}). Without waits, a step takes {slow.own:.3g} s, and "
            f"{slow.usual:.3g} s on the other ranks (medians of {STEPS} steps). Most of the "
            f"difference is in: {slow.phase}"
        )
        return slow


def straggler(rows: Sequence[Sequence[float]]) -> Straggler | None:
    """Return the slowest rank if it is a straggler, otherwise None.

    Args:
        rows: Each rank's result of `StepTimes.row`.
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
