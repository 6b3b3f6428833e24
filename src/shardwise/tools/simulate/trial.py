"""Trial: simulates one run without islands, event by event.

Nothing changes between two events, so all steps and saves between them are computed at once.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

from shardwise.tools.simulate.failure_classes import FailureClass
from shardwise.tools.simulate.outcome import USEFUL
from shardwise.tools.simulate.run_model import RunModel
from shardwise.tools.simulate.simulation import Simulation


class Trial(Simulation):
    """A run in which each failure stops all devices."""

    _work = 0.0

    def __init__(self, model: RunModel, seed: int, moments: Sequence[float] | None = None) -> None:
        super().__init__(model, seed, moments)
        self._since = 0.0
        """Work done since the last save."""
        self._hosts = model.topology.hosts
        self._least = model.least or (model.topology.hosts if model.reconnect is None else 1)

    @property
    def _is_done(self) -> bool:
        return self._work >= self._model.work * (1 - 1e-12)

    # -- work and saves -----------------------------------------------------------------------

    def _go_on(self, until: float) -> None:
        model = self._model
        # With fewer hosts, each second of work takes longer.
        hosts = model.topology.hosts / self._hosts
        pace = self._slowest * self._slow_factor * hosts  # wall seconds per second of work
        while self._time.now < until and not self._is_done:
            left = min(model.interval - self._since, model.work - self._work)
            if self._time.now + left * pace > until:
                self._spend_working((until - self._time.now) / pace)
                self._time.now = until
                return
            self._spend_working(left)
            if not self._is_done:
                self._repeat(until, pace)
                # An event at `until` may interrupt the save. In that case the save takes time but
                # produces no checkpoint.
                seconds = min(model.save, until - self._time.now)
                self._time.spend({"saves": seconds})
                if seconds >= model.save:
                    self._written.append((self._time.now + model.background, self._work))
                    self._since = 0.0

    def _spend_working(self, work: float, saves: float = 0.0) -> None:
        """Advance by `work` seconds of work, interleaved with `saves` seconds of saves."""
        slowest, slow = self._slowest, self._slow_factor
        hosts = self._model.topology.hosts / self._hosts
        self._time.spend(
            {
                USEFUL: work,
                "slowest": work * (slowest - 1),
                "slow": work * slowest * (slow - 1),
                "fewer": work * slowest * slow * (hosts - 1),
                "saves": saves,
            }
        )
        self._work += work
        self._since += work

    def _repeat(self, until: float, pace: float) -> None:
        """Skip ahead over all full cycles, each of which is a save and an interval of work.

        A save must be due when this is called, and one is due again afterwards. The cycles end
        before `until`, and before the work is done.
        """
        model = self._model
        cycle = model.save + model.interval * pace
        # The small term excludes the last interval of the run, which no save follows.
        room = min(
            (until - self._time.now) / cycle, (model.work - self._work) / model.interval - 1e-9
        )
        cycles = int(room)
        if cycles < 1:
            return
        self._spend_working(cycles * model.interval, cycles * model.save)
        self._since = model.interval
        now, work = self._time.now, self._work
        # Record only the checkpoints that can still be incomplete, and the newest complete one.
        behind = min(cycles, math.ceil(model.background / cycle) + 1)
        for back in range(behind, 0, -1):
            ended = now - (back - 1) * cycle - model.interval * pace
            self._written.append((ended + model.background, work - back * model.interval))

    # -- events -------------------------------------------------------------------------------

    def _take_events(self) -> None:
        now = self._time.now
        # To use a returned host, the run needs a restart, which is planned and loses no work.
        if self._take_returns():
            if self._model.reconnect is None:
                self._stop_as_planned()
            else:
                self._admit()
        if self._next <= now:
            hosts, failure = self._hosts, self._strike()
            if failure is not None and failure.planned:
                self._stop_as_planned()
            elif failure is not None and failure.slowdown == 1:
                if self._model.survives(failure) and self._least <= self._hosts:
                    self._continue_after(failure, replaced=self._hosts == hosts)
                else:
                    self._stop(failure)

    def _take_returns(self) -> bool:
        """Return repaired hosts to the run or to the spares. Return True if the run gained any."""
        missed = False
        while self._returns and self._returns[0] <= self._time.now:
            heapq.heappop(self._returns)
            # Replace missing hosts of the run first, then add to the spares.
            if self._hosts < self._model.topology.hosts:
                self._hosts, missed = self._hosts + 1, True
            else:
                self._free += 1
        return missed

    def _strike(self) -> FailureClass | None:
        """Draw the class of the current failure. Return None if it hits an absent host."""
        model = self._model
        failure = self._draw_failure()
        absent = 1 - self._hosts / model.topology.hosts
        # The rate includes absent hosts. Discarding their failures leaves a Poisson process of the
        # present hosts.
        if failure.scope != "job" and absent and self._random.random() < absent:
            return None
        self._record(failure)
        if failure.repair and failure.slowdown == 1:
            self._take_away(failure)
        return failure

    def _take_away(self, failure: FailureClass) -> None:
        """Send the failed hosts to repair, and replace them with spares."""
        gone = min(self._model.topology.hosts_of(failure.scope), self._hosts)
        spares = min(gone, self._free)
        self._free -= spares
        self._hosts -= gone - spares
        # A single draw, because all hosts of a rack or pod return together.
        back = self._time.now + float(self._random.exponential(failure.repair))
        for _ in range(gone):
            heapq.heappush(self._returns, back)

    # -- stops --------------------------------------------------------------------------------

    def _stop(self, failure: FailureClass) -> None:
        """Handle a failure: return to the newest complete checkpoint, and restart."""
        self._lose_unsaved_work()
        self._work, self._since = self._kept, 0.0
        self._time.spend({"detection": min(failure.detect, self._model.detect)})
        self._start_again()

    def _continue_after(self, failure: FailureClass, *, replaced: bool) -> None:
        """Handle the loss of a host: repeat the step in progress on the others.

        If the host was `replaced`, the new one joins at the next step.
        """
        assert self._model.reconnect is not None
        begun = min(self._work % self._model.step, self._since)
        self._time.lose(begun)
        self._work -= begun
        self._since -= begun
        self._time.spend({"detection": min(failure.detect, self._model.detect)})
        self._time.spend({"reconnecting": self._model.reconnect})
        if replaced:
            self._admit()

    def _admit(self) -> None:
        """Admit a host: save a checkpoint, which it loads, and connect to it."""
        assert self._model.reconnect is not None
        seconds = self._model.save + self._model.background + self._model.reconnect
        self._time.spend({"reconnecting": seconds})
        self._written.clear()
        self._kept, self._since = self._work, 0.0

    def _stop_as_planned(self) -> None:
        """Save, and restart with the hosts that are present."""
        # The run stops after this save, so it also waits for the background part.
        self._time.spend({"saves": self._model.save + self._model.background})
        self._written.clear()
        self._kept, self._since = self._work, 0.0
        self._start_again()

    def _start_again(self) -> None:
        """Wait for enough hosts, and restart. A failure during the restart makes it start over."""
        while self._time.now < self._limit:
            self._take_returns()
            # Idle hosts do not fail, so redraw the next failure after waiting.
            while self._hosts < self._least and self._time.now < self._limit:
                self._time.spend({"waiting": max(0.0, self._returns[0] - self._time.now)})
                self._take_returns()
                self._next = self._draw_next()
            starts = self._time.now + self._model.restart
            # If the next failure is after the restart, keep it. The exponential distribution is
            # memoryless, so no new draw is needed.
            if self._next > starts:
                self._time.spend({"restart": self._model.restart})
                return
            # A failure during the restart or detection also takes down its hosts.
            self._time.spend({"restart": max(0.0, self._next - self._time.now)})
            failure = self._strike()
            if failure is not None and failure.slowdown == 1 and not failure.planned:
                self._time.spend({"detection": min(failure.detect, self._model.detect)})
