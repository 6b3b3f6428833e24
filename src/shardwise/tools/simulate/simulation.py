"""Simulation: the part of a simulated run that does not depend on how failures affect it.

The events are failures, hosts returning from repair, and the ends of slow periods. Failures of all
components form a single Poisson process with the sum of their rates. The class of each failure is
drawn at random.
"""

from __future__ import annotations

import heapq
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np

from shardwise.tools.simulate.failure_classes import FailureClass
from shardwise.tools.simulate.outcome import BINS, GIVES_UP, Outcome, TimeSpent
from shardwise.tools.simulate.run_model import RunModel


class Simulation(ABC):
    """Simulates `model` with random numbers from `seed`.

    If `moments` (increasing, in seconds) is not None, failures happen at these times instead of at
    random ones.
    """

    def __init__(self, model: RunModel, seed: int, moments: Sequence[float] | None = None) -> None:
        self._model = model
        self._random = np.random.default_rng(seed)
        rates = [each.rate_over(model.topology) for each in model.failures]
        self._rate = sum(rates)
        # The cumulative rates, for drawing the class of a failure.
        self._sums = np.cumsum(rates)
        self._slowest = model.slowest
        self._time = TimeSpent(model.work / BINS)
        self._kept = 0.0
        """Work in the newest complete checkpoint."""
        self._written: list[tuple[float, float]] = []
        """Checkpoints being written, as (time of completion, work that it contains)."""
        self._free = model.spares
        self._returns: list[float] = []
        """Heap of times at which hosts return from repair."""
        self._slow: list[tuple[float, float]] = []
        """Heap of slow periods, as (end time, slowdown)."""
        self._stops = 0
        self._failures: dict[str, int] = {}
        self._moments: list[tuple[float, str]] = []
        self._given = None if moments is None else deque(moments)
        self._next = self._draw_next()

    def run(self) -> Outcome:
        """Simulate the run until it ends, or until it takes GIVES_UP times as long as its work."""
        while not self._is_done and self._time.now < self._limit:
            ends = [self._next, *self._returns[:1], *(end for end, _ in self._slow[:1])]
            self._go_on(min(*ends, *self._further_events(), self._limit))
            if not self._is_done:
                while self._slow and self._slow[0][0] <= self._time.now:
                    heapq.heappop(self._slow)
                self._take_events()
        return self._time.closed(
            failures=self._failures, moments=self._moments, whole=self._is_done, stops=self._stops
        )

    @property
    def _limit(self) -> float:
        return GIVES_UP * self._model.work

    @property
    def _slow_factor(self) -> float:
        return max((factor for _, factor in self._slow), default=1.0)

    @property
    @abstractmethod
    def _work(self) -> float:
        """Work done so far, in seconds of steps without jitter or slowdowns."""

    @property
    @abstractmethod
    def _is_done(self) -> bool:
        """True if all of the work is done."""

    @abstractmethod
    def _go_on(self, until: float) -> None:
        """Work and save until time `until`, or until the work is done."""

    @abstractmethod
    def _take_events(self) -> None:
        """Handle the events of the current time. Slow periods have ended already."""

    def _further_events(self) -> Iterator[float]:
        """Yield the times of events that only this kind of run has."""
        yield from ()

    # -- failures -----------------------------------------------------------------------------

    def _draw_next(self) -> float:
        """Return the time of the next failure of any component."""
        if self._given is not None:
            while self._given and self._given[0] < self._time.now:
                self._given.popleft()
            return self._given.popleft() if self._given else math.inf
        if not self._rate:
            return math.inf
        return self._time.now + float(self._random.exponential(1 / self._rate))

    def _draw_failure(self) -> FailureClass:
        """Return the class of the current failure, and draw the time of the next one."""
        # Draw the class in proportion to the rates.
        drawn = self._random.random() * self._rate
        failure = self._model.failures[int(np.searchsorted(self._sums, drawn, side="right"))]
        self._next = self._draw_next()
        return failure

    def _record(self, failure: FailureClass) -> None:
        """Count a failure. If it slows devices down, begin the slow period."""
        self._failures[failure.name] = self._failures.get(failure.name, 0) + 1
        self._moments.append((self._time.now, failure.name))
        if failure.slowdown > 1:
            lasts = float(self._random.exponential(failure.lasts))
            heapq.heappush(self._slow, (self._time.now + lasts, failure.slowdown))

    def _lose_unsaved_work(self) -> None:
        """Count a stop of the entire run, which loses the work since the newest checkpoint."""
        self._stops += 1
        # A background save that was not complete at the failure is lost.
        while self._written and self._written[0][0] <= self._time.now:
            self._kept = self._written.pop(0)[1]
        self._written.clear()
        self._time.lose(self._work - self._kept)
