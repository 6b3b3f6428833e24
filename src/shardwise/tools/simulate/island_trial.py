"""IslandTrial: one simulated run with islands. A failure stops only the islands that it hits.

Present islands run in step: a round of steps, then a boundary that makes their parameters equal,
and at some rounds a save. An island that fails loses its work of that round. It restarts while the
others continue, and rejoins at a boundary with their common parameters:

    island 0   steps │ boundary │ steps │ boundary │ steps │ boundary │ steps
    island 1   steps │ boundary │ st†     detection, restart, rejoining │ steps

Before an island rejoins, the present islands stop and save a checkpoint for it. At a boundary they
wait for a failed island until the failure is noticed. If no island is left, all of them go back to
the newest checkpoint. The run is done when all islands together have made as many seconds of steps
as the run has for each: the others make up for the steps of an absent island.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

import numpy as np

from shardwise.tools.simulate.failure_classes import FailureClass
from shardwise.tools.simulate.outcome import BINS, GIVES_UP, USEFUL, Outcome, TimeSpent
from shardwise.tools.simulate.run_model import RunModel

WORK, BOUNDARY, SAVE = "work", "boundaries", "saves"
"""The parts of a round, in order. The last two are causes of lost time, too."""


@dataclass(eq=False)
class _Absence:
    """An island that is absent: the cause that its time is counted under, and until when.

    `missing` is the number of units (RunModel.units_per_host) that it lacks. `awaited`: the others
    have not noticed the failure, and wait for the island at the boundary.
    """

    cause: str
    until: float
    missing: int = 0
    awaited: bool = False


class IslandTrial:
    """Simulates `model` with the random numbers of `seed`."""

    def __init__(self, model: RunModel, seed: int) -> None:
        self._model = model
        self._random = np.random.default_rng(seed)
        rates = [each.rate_over(model.topology) for each in model.failures]
        self._rate = sum(rates)
        self._sums = np.cumsum(rates)
        self._slowest = model.slowest
        self._units = model.topology.hosts * model.units_per_host // model.islands
        """The number of units of an island."""
        self._stops = 0
        self._time = TimeSpent(model.work / BINS)
        self._away: dict[int, _Absence] = {}
        self._left: list[tuple[str, float]] = []
        """The rest of the round: parts and their seconds (of work at the speed of an even step)."""
        self._round = 0.0
        """Work of this round that each present island has done."""
        self._saves_in = self._rounds_between_saves
        self._kept = 0.0
        self._written: list[tuple[float, float]] = []
        """Checkpoints being written: when each is complete, and the work that it contains."""
        self._free = model.spares
        self._returns: list[float] = []
        self._slow: list[tuple[float, float]] = []
        self._failures: dict[str, int] = {}
        self._moments: list[tuple[float, str]] = []
        self._next = self._draw_next()

    def run(self) -> Outcome:
        """Run to the end, or until GIVES_UP times the work has passed."""
        limit = GIVES_UP * self._model.work
        while not self._is_done and self._time.now < limit:
            ends = [self._next, *self._returns[:1], *(end for end, _ in self._slow[:1])]
            ends += [each.until for each in self._away.values()]
            self._go_on(min(*ends, limit))
            if not self._is_done:
                self._take_events()
        return self._time.closed(
            failures=self._failures, moments=self._moments, whole=self._is_done, stops=self._stops
        )

    # -- rounds -------------------------------------------------------------------------------

    @property
    def _work(self) -> float:
        """Work done, as seconds of all islands."""
        return self._time.totals[USEFUL]

    @property
    def _is_done(self) -> bool:
        # Sums of many parts: exact equality would leave a rest of a few rounding errors.
        return self._work >= self._model.work * (1 - 1e-9)

    @property
    def _share(self) -> float:
        """The fraction of the islands that is present."""
        return 1 - len(self._away) / self._model.islands

    @property
    def _pace(self) -> float:
        """Wall seconds per second of work."""
        return self._slowest * max((factor for _, factor in self._slow), default=1.0)

    @property
    def _length(self) -> float:
        """Work of a whole round."""
        return self._model.every * self._model.step

    @property
    def _rounds_between_saves(self) -> int:
        return max(1, round(self._model.interval / self._length))

    def _go_on(self, until: float) -> None:
        """Run rounds until the second `until`, or until the work is done."""
        while self._time.now < until and not self._is_done:
            if not self._share:
                self._spend(until - self._time.now, {})
                self._time.now = until
                return
            if not self._left:
                self._begin_round()
                if self._left[0][0] == WORK:
                    self._repeat(until)
            self._pass(until)

    def _begin_round(self) -> None:
        """Begin a round. Waiting islands rejoin, from a checkpoint that must be complete first."""
        away = {n: each for n, each in self._away.items() if each.cause != "rejoining"}
        # Somebody rejoins, and somebody is present to save for it. If all were absent, they load
        # the newest checkpoint.
        admits = len(away) < len(self._away) < self._model.islands
        # Rejoining islands have waited for exactly this moment.
        self._away, self._round = away, 0.0
        # Fewer islands need longer for the rest, because together they do the work of all.
        needed = (self._model.work - self._work) / self._share
        self._left = [(WORK, min(self._length, needed)), (BOUNDARY, self._model.boundary)]
        # A checkpoint for a rejoining island blocks until it is written. Other saves finish in the
        # background.
        if admits:
            self._left.insert(0, (SAVE, self._model.save + self._model.background))
        if self._saves_in <= 1:
            self._left.append((SAVE, self._model.save))

    def _repeat(self, until: float) -> None:
        """Run at once all rounds that end before `until`, the next save and the last round."""
        # A round with a boundary that waits for a failed island is not like the others.
        if any(each.awaited for each in self._away.values()):
            return
        # Walking through each round of a run of months would take minutes.
        seconds = self._length * self._pace + self._model.boundary
        whole = int((self._model.work - self._work) / self._share / self._length) - 1
        count = min(int((until - self._time.now) / seconds), self._saves_in - 1, whole)
        if count > 0:
            work = count * self._length
            parts = self._parts_of_work(work) | {BOUNDARY: count * self._model.boundary}
            self._spend(count * seconds, parts)
            self._saves_in -= count
            self._begin_round()

    def _pass(self, until: float) -> None:
        """Run the next part of the round, up to the second `until`."""
        kind, left = self._left[0]
        room = until - self._time.now
        if kind == BOUNDARY and any(each.awaited for each in self._away.values()):
            self._spend(room, {"detection": room})  # the detection is an event, at `until` or later
            self._time.now = until
            return
        pace = self._pace if kind == WORK else 1.0
        passed = min(left, room / pace)
        parts = self._parts_of_work(passed) if kind == WORK else {kind: passed}
        self._spend(passed * pace, parts)
        self._round += passed if kind == WORK else 0.0
        if passed < left:
            self._left[0] = (kind, left - passed)
            self._time.now = until
        else:
            self._end(kind)

    def _parts_of_work(self, work: float) -> dict[str, float]:
        slow = self._pace / self._slowest
        return {
            USEFUL: work,
            "slowest": work * (self._slowest - 1),
            "slow": work * self._slowest * (slow - 1),
        }

    def _end(self, kind: str) -> None:
        """End the first of the remaining parts of the round."""
        del self._left[0]
        if kind == BOUNDARY:
            self._round = 0.0  # the common parameters contain it: a failure cannot lose it now
            self._saves_in -= 1
        elif kind == SAVE:
            if self._saves_in < 1:  # otherwise this save was for a rejoining island
                self._saves_in = self._rounds_between_saves
            self._written.append((self._time.now + self._model.background, self._work))

    def _spend(self, seconds: float, parts: dict[str, float]) -> None:
        """Spend `seconds`: `parts` on the present islands, and the causes of absent ones."""
        # Each island has an equal share of the wall time.
        one = 1 / self._model.islands
        spent = {kind: value * self._share for kind, value in parts.items()}
        for each in self._away.values():
            spent[each.cause] = spent.get(each.cause, 0.0) + seconds * one
        self._time.spend(spent)

    # -- events -------------------------------------------------------------------------------

    def _draw_next(self) -> float:
        if not self._rate:
            return math.inf
        return self._time.now + float(self._random.exponential(1 / self._rate))

    def _take_events(self) -> None:
        """Handle the events that are due."""
        now = self._time.now
        while self._slow and self._slow[0][0] <= now:
            heapq.heappop(self._slow)
        while self._returns and self._returns[0] <= now:
            heapq.heappop(self._returns)
            self._take_back_host()
        for each in self._away.values():
            # Causes without a fixed end have an infinite `until`: a host or a boundary ends them.
            if each.until <= now:
                self._advance(each)
        if not self._share and any(each.cause == "rejoining" for each in self._away.values()):
            self._begin_round()  # no island is present, so rejoining need not wait for a boundary
        if self._next <= now:
            self._strike()

    def _take_back_host(self) -> None:
        """Give a repaired host to an island that lacks one, or keep it as a spare."""
        lacking = next((each for each in self._away.values() if each.missing), None)
        if lacking is None:
            self._free += 1
            return
        lacking.missing -= 1
        if lacking.cause == "waiting" and not lacking.missing:
            self._enter(lacking, "restart", self._model.restart)

    def _advance(self, each: _Absence) -> None:
        """Move an absent island to the next cause after the current one has ended."""
        each.awaited = False
        if each.cause == "restart":
            self._enter(each, "rejoining", math.inf)
        elif each.missing:
            self._enter(each, "waiting", math.inf)
        else:
            self._enter(each, "restart", self._model.restart)

    def _enter(self, each: _Absence, cause: str, seconds: float) -> None:
        each.cause, each.until = cause, self._time.now + seconds

    # -- failures -----------------------------------------------------------------------------

    def _strike(self) -> None:
        """Handle a failure that happens now."""
        # The class is drawn in proportion to its rate.
        drawn = self._random.random() * self._rate
        failure = self._model.failures[int(np.searchsorted(self._sums, drawn, side="right"))]
        self._next = self._draw_next()
        hit = self._hit(failure)
        working = [island for island in hit if island not in self._away]
        # Nothing happens to an island that is absent, unless the failure takes more of its hosts.
        if not working and (not hit or failure.planned or failure.slowdown > 1):
            return
        self._failures[failure.name] = self._failures.get(failure.name, 0) + 1
        self._moments.append((self._time.now, failure.name))
        if failure.slowdown > 1:
            lasts = float(self._random.exponential(failure.lasts))
            heapq.heappush(self._slow, (self._time.now + lasts, failure.slowdown))
        elif failure.planned:
            self._leave(working)
        else:
            self._fail(failure, hit, working)

    def _hit(self, failure: FailureClass) -> dict[int, int]:
        """Return the islands that a failure hits, and the number of units that it hits in each.

        Islands that wait for hosts are idle, and idle hosts do not fail.
        """
        topology = self._model.topology
        if failure.scope == "job":
            gone = dict.fromkeys(range(self._model.islands), 0)
        else:
            place = int(self._random.integers(topology.components(failure.scope)))
            gone = {}
            for unit in self._model.units_at(failure.scope, place):
                island = unit // self._units
                gone[island] = gone.get(island, 0) + 1
        away = self._away
        return {n: c for n, c in gone.items() if n not in away or away[n].cause != "waiting"}

    def _leave(self, islands: list[int]) -> None:
        """Stop islands as planned. Their work is kept, by a save if no island remains."""
        # No island remains that could give the others its parameters, so a checkpoint must keep the
        # work.
        if len(self._away) + len(islands) == self._model.islands:
            self._spend(self._model.save, {SAVE: self._model.save})
            self._kept = self._work
            self._written.clear()
        self._send_away(islands, "restart", self._model.restart)

    def _fail(self, failure: FailureClass, hit: dict[int, int], working: list[int]) -> None:
        """Handle a failure: the islands lose their work of the round.

        If no island is left, the run loses all work that is not in a checkpoint.
        """
        detect = min(failure.detect, self._model.detect)
        # `_round` is the work since the boundary. Work counts in seconds of all islands.
        self._time.lose(self._round * len(working) / self._model.islands)
        self._send_away(working, "detection", detect)
        back = self._time.now
        if failure.repair:  # one draw: all hosts of a rack return together
            back += float(self._random.exponential(failure.repair))
        for island in hit:
            each = self._away[island]
            # A failure during the restart: it starts over with the detection.
            if each.cause in ("restart", "rejoining"):
                self._enter(each, "detection", detect)
            if failure.repair:
                self._take_away(each, hit[island], back)
        if working and not self._share:
            self._go_back()

    def _send_away(self, islands: list[int], cause: str, seconds: float) -> None:
        until = self._time.now + seconds
        for island in islands:
            self._away[island] = _Absence(cause, until, awaited=cause == "detection")

    def _go_back(self) -> None:
        """Go back to the newest complete checkpoint, because no island is left."""
        self._stops += 1
        while self._written and self._written[0][0] <= self._time.now:
            self._kept = self._written.pop(0)[1]
        self._written.clear()
        self._time.lose(self._work - self._kept)
        self._saves_in = self._rounds_between_saves
        for each in self._away.values():
            # Nobody is left to wait for it.
            each.awaited = False

    def _take_away(self, each: _Absence, units: int, back: float) -> None:
        """Send units of an island to repair until `back`, and replace them by spares."""
        # Units in repair cannot fail again.
        gone = min(units, self._units - each.missing)
        spares = min(gone, self._free)
        self._free -= spares
        each.missing += gone - spares
        for _ in range(gone):
            heapq.heappush(self._returns, back)
