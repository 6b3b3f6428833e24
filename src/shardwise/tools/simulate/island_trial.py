"""IslandTrial: one simulated run of islands, of which a failure stops only those that it hits.

Islands that are there go in step: a round of steps, then a boundary at which all become equal, and
now and then a save. One that failed has lost what it did in that round; it starts again while the
others go on, and comes back at a boundary, with what they have in common there:

    island 0   steps │ boundary │ steps │ boundary │ steps │ boundary │ steps
    island 1   steps │ boundary │ st†     detection, restart, rejoining │ steps

Before it takes part, those that are there save a checkpoint for it, for which all stand still.
Others wait at a boundary for one that has failed until that is noticed. Where none is left, all go
back to the newest checkpoint. Work counts when so many seconds of steps were made by all islands
together as the run has for each: what an absent island does not do, the others do later.
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
"""The parts of a round, in their order; the last two are causes of lost time too."""


@dataclass(eq=False)
class _Absence:
    """An island that is away: the cause that its time goes to, until when that lasts, and how many
    units (RunModel.units_per_host) it lacks. `awaited`: the others do not know yet, and wait for it
    at the boundary."""

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
        """Units of an island."""
        self._stops = 0
        self._time = TimeSpent(model.work / BINS)
        self._away: dict[int, _Absence] = {}
        self._left: list[tuple[str, float]] = []
        """What is left of the round: parts, and seconds (of work as if no device were slow)."""
        self._round = 0.0
        """Work of this round that each island in it has done."""
        self._saves_in = self._rounds_between_saves
        self._kept = 0.0
        self._written: list[tuple[float, float]] = []
        """Checkpoints on their way: when each is complete, and its work."""
        self._free = model.spares
        self._returns: list[float] = []
        self._slow: list[tuple[float, float]] = []
        self._failures: dict[str, int] = {}
        self._moments: list[tuple[float, str]] = []
        self._next = self._draw_next()

    def run(self) -> Outcome:
        """Run to the end, or to GIVES_UP times the work."""
        limit = GIVES_UP * self._model.work
        while not self._is_done and self._time.now < limit:
            self._go_on(min(self._next_event(), limit))
            if not self._is_done:
                self._take_events()
        return self._time.closed(
            failures=self._failures, moments=self._moments, whole=self._is_done, stops=self._stops
        )

    # -- rounds -------------------------------------------------------------------------------

    @property
    def _work(self) -> float:
        """Work that was done, in seconds of all islands."""
        return self._time.totals[USEFUL]

    @property
    def _is_done(self) -> bool:
        return self._work >= self._model.work * (1 - 1e-9)

    @property
    def _share(self) -> float:
        """The fraction of the islands that is there."""
        return 1 - len(self._away) / self._model.islands

    @property
    def _pace(self) -> float:
        """Wall seconds of a second of work."""
        return self._slowest * max((factor for _, factor in self._slow), default=1.0)

    @property
    def _length(self) -> float:
        """Work of a whole round."""
        return self._model.every * self._model.step

    @property
    def _rounds_between_saves(self) -> int:
        return max(1, round(self._model.interval / self._length))

    def _go_on(self, until: float) -> None:
        """Go through rounds until the second `until`, or the end of the work."""
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
        """The islands that have waited for it come back, by a checkpoint of those that are there,
        which is complete before they go on."""
        away = {n: each for n, each in self._away.items() if each.cause != "rejoining"}
        admits = len(away) < len(self._away) < self._model.islands
        self._away, self._round = away, 0.0
        needed = (self._model.work - self._work) / self._share
        self._left = [(WORK, min(self._length, needed)), (BOUNDARY, self._model.boundary)]
        if admits:
            self._left.insert(0, (SAVE, self._model.save + self._model.background))
        if self._saves_in <= 1:
            self._left.append((SAVE, self._model.save))

    def _repeat(self, until: float) -> None:
        """Let all rounds pass at once that end before `until`, the next save and the last round."""
        if any(each.awaited for each in self._away.values()):
            return
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
        """Go through what comes next of the round."""
        kind, left = self._left[0]
        room = until - self._time.now
        if kind == BOUNDARY and any(each.awaited for each in self._away.values()):
            self._spend(room, {"detection": room})  # until that is noticed, which is an event
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
        """The first part of what was left of the round is over."""
        del self._left[0]
        if kind == BOUNDARY:
            self._round = 0.0  # what is in the common value is not lost any more
            self._saves_in -= 1
        elif kind == SAVE:
            if self._saves_in < 1:  # else it was made for one that comes back
                self._saves_in = self._rounds_between_saves
            self._written.append((self._time.now + self._model.background, self._work))

    def _spend(self, seconds: float, parts: dict[str, float]) -> None:
        """Let `seconds` pass: `parts` of those islands that are there, and what others wait for."""
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

    def _next_event(self) -> float:
        ends = [self._next, *self._returns[:1], *(end for end, _ in self._slow[:1])]
        return min([*ends, *(each.until for each in self._away.values())])

    def _take_events(self) -> None:
        """Take what has come by now."""
        now = self._time.now
        while self._slow and self._slow[0][0] <= now:
            heapq.heappop(self._slow)
        while self._returns and self._returns[0] <= now:
            heapq.heappop(self._returns)
            self._take_back_host()
        for each in self._away.values():
            if each.until <= now:
                self._advance(each)
        if not self._share and any(each.cause == "rejoining" for each in self._away.values()):
            self._begin_round()  # none is there that they would have to wait for
        if self._next <= now:
            self._strike()

    def _take_back_host(self) -> None:
        """Give a host that is back to an island that lacks one, or let it stand by."""
        lacking = next((each for each in self._away.values() if each.missing), None)
        if lacking is None:
            self._free += 1
            return
        lacking.missing -= 1
        if lacking.cause == "waiting" and not lacking.missing:
            self._enter(lacking, "restart", self._model.restart)

    def _advance(self, each: _Absence) -> None:
        """What kept an island away is over; the next thing begins."""
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
        """The failure that has come now."""
        drawn = self._random.random() * self._rate
        failure = self._model.failures[int(np.searchsorted(self._sums, drawn, side="right"))]
        self._next = self._draw_next()
        hit = self._hit(failure)
        working = [island for island in hit if island not in self._away]
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
        """The islands that a failure hits, and how many units of each; those that wait for hosts
        are idle, and what is idle does not fail."""
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
        """Islands end as planned: what they have done is kept, by a save where none stays."""
        if len(self._away) + len(islands) == self._model.islands:
            self._spend(self._model.save, {SAVE: self._model.save})
            self._kept = self._work
            self._written.clear()
        self._send_away(islands, "restart", self._model.restart)

    def _fail(self, failure: FailureClass, hit: dict[int, int], working: list[int]) -> None:
        """Islands that fail lose their part of the round, and all what no checkpoint has where none
        is left."""
        detect = min(failure.detect, self._model.detect)
        self._time.lose(self._round * len(working) / self._model.islands)
        self._send_away(working, "detection", detect)
        back = self._time.now
        if failure.repair:  # all hosts of a rack come back together
            back += float(self._random.exponential(failure.repair))
        for island in hit:
            each = self._away[island]
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
        """All islands are away: what the newest complete checkpoint has is left."""
        self._stops += 1
        while self._written and self._written[0][0] <= self._time.now:
            self._kept = self._written.pop(0)[1]
        self._written.clear()
        self._time.lose(self._work - self._kept)
        self._saves_in = self._rounds_between_saves
        for each in self._away.values():
            each.awaited = False

    def _take_away(self, each: _Absence, units: int, back: float) -> None:
        """Send units of an island to repair until `back`, and put spares in their place."""
        gone = min(units, self._units - each.missing)
        spares = min(gone, self._free)
        self._free -= spares
        each.missing += gone - spares
        for _ in range(gone):
            heapq.heappush(self._returns, back)
