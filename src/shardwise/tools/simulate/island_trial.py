"""IslandTrial: simulates one run with islands. A failure stops only the islands that it hits.

The present islands run in lockstep. A round consists of steps, a boundary that synchronises their
parameters, and in some rounds a save. An island that fails loses its work of the current round. It
restarts while the others continue, and rejoins at a boundary with the parameters that they share:

    island 0   steps │ boundary │ steps │ boundary │ steps │ boundary │ steps
    island 1   steps │ boundary │ st†     detection, restart, rejoining │ steps

Before an island rejoins, the present islands stop and save a checkpoint for it. At a boundary, they
wait for a failed island until its failure is noticed. If no island is present, all of them return
to the newest checkpoint. The run ends when all islands together have done the total work, so the
present islands make up for the steps that an absent one misses.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass

from shardwise.tools.simulate.failure_classes import FailureClass
from shardwise.tools.simulate.outcome import USEFUL
from shardwise.tools.simulate.run_model import RunModel
from shardwise.tools.simulate.simulation import Simulation

WORK, BOUNDARY, SAVE = "work", "boundaries", "saves"
"""The parts of a round, in order. The last two are also causes of lost time."""


@dataclass(eq=False)
class _Absence:
    """The state of an absent island.

    Attributes:
        cause: Current cause of the absence, one of CAUSES.
        until: Time when this cause ends.
        missing: Number of units that the island lacks (see RunModel.units_per_host).
        awaited: True if the present islands have not noticed the failure yet, and so wait for this
            island at the boundary.
    """

    cause: str
    until: float
    missing: int = 0
    awaited: bool = False


class IslandTrial(Simulation):
    """A run with islands."""

    def __init__(self, model: RunModel, seed: int) -> None:
        super().__init__(model, seed)
        self._units = model.topology.hosts * model.units_per_host // model.islands
        """Number of units per island."""
        self._away: dict[int, _Absence] = {}
        self._left: list[tuple[str, float]] = []
        """Remaining parts of the round, with their seconds (for WORK, seconds of work)."""
        self._round = 0.0
        """Work that each present island has done in this round."""
        self._saves_in = self._rounds_between_saves

    # -- rounds -------------------------------------------------------------------------------

    @property
    def _work(self) -> float:
        """The total work of all islands, as the seconds that the entire run would need for it."""
        return self._time.totals[USEFUL]

    @property
    def _is_done(self) -> bool:
        # The work is a sum of many parts, so allow for rounding errors.
        return self._work >= self._model.work * (1 - 1e-9)

    @property
    def _share(self) -> float:
        """The fraction of islands that are present."""
        return 1 - len(self._away) / self._model.islands

    @property
    def _pace(self) -> float:
        """Wall seconds per second of work."""
        return self._slowest * self._slow_factor

    @property
    def _length(self) -> float:
        """Seconds of work in a full round."""
        return self._model.every * self._model.step

    @property
    def _rounds_between_saves(self) -> int:
        return max(1, round(self._model.interval / self._length))

    def _go_on(self, until: float) -> None:
        """Run rounds until time `until`, or until the work is done."""
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
        """Begin a round. Islands that are waiting at the boundary rejoin."""
        away = {n: each for n, each in self._away.items() if each.cause != "rejoining"}
        # True if an island rejoins and a present island saves a checkpoint for it. If all islands
        # were absent, they load the newest checkpoint instead.
        admits = len(away) < len(self._away) < self._model.islands
        self._away, self._round = away, 0.0
        # Fewer islands need longer for the remaining work, because they also do the work of the
        # absent ones.
        needed = (self._model.work - self._work) / self._share
        self._left = [(WORK, min(self._length, needed)), (BOUNDARY, self._model.boundary)]
        # A save for a rejoining island blocks until the checkpoint is written. Other saves finish
        # in the background.
        if admits:
            self._left.insert(0, (SAVE, self._model.save + self._model.background))
        if self._saves_in <= 1:
            self._left.append((SAVE, self._model.save))

    def _repeat(self, until: float) -> None:
        """Skip ahead over all rounds that end before `until`, the next save and the last round."""
        # A round whose boundary waits for a failed island differs from the other rounds.
        if any(each.awaited for each in self._away.values()):
            return
        # Compute the identical rounds at once, because simulating each round of a run of months
        # would take minutes.
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
        """Run the next part of the round, until time `until` at the latest."""
        kind, left = self._left[0]
        room = until - self._time.now
        if kind == BOUNDARY and any(each.awaited for each in self._away.values()):
            # The detection is an event, which happens at `until` or later.
            self._spend(room, {"detection": room})
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
        """Finish the current part of the round, which is of kind `kind`."""
        del self._left[0]
        if kind == BOUNDARY:
            self._round = 0.0  # the common parameters contain this work, so failures cannot lose it
            self._saves_in -= 1
        elif kind == SAVE:
            if self._saves_in < 1:  # otherwise, this save was for a rejoining island
                self._saves_in = self._rounds_between_saves
            self._written.append((self._time.now + self._model.background, self._work))

    def _spend(self, seconds: float, parts: dict[str, float]) -> None:
        """Advance the time by `seconds`.

        Present islands spend this time on `parts`. Absent islands spend it on their causes.
        """
        # The wall time is divided equally among the islands.
        one = 1 / self._model.islands
        spent = {kind: value * self._share for kind, value in parts.items()}
        for each in self._away.values():
            spent[each.cause] = spent.get(each.cause, 0.0) + seconds * one
        self._time.spend(spent)

    # -- events -------------------------------------------------------------------------------

    def _further_events(self) -> Iterator[float]:
        return (each.until for each in self._away.values())

    def _take_events(self) -> None:
        now = self._time.now
        while self._returns and self._returns[0] <= now:
            heapq.heappop(self._returns)
            self._take_back_host()
        for each in self._away.values():
            # Causes without a fixed end have an infinite `until`. A returning host or a boundary
            # ends them.
            if each.until <= now:
                self._advance(each)
        if not self._share and any(each.cause == "rejoining" for each in self._away.values()):
            self._begin_round()  # no island is present, so there is no boundary to wait for
        if self._next <= now:
            self._strike()

    def _take_back_host(self) -> None:
        """Assign a repaired unit to an island that lacks one, or keep it as a spare."""
        lacking = next((each for each in self._away.values() if each.missing), None)
        if lacking is None:
            self._free += 1
            return
        lacking.missing -= 1
        if lacking.cause == "waiting" and not lacking.missing:
            self._enter(lacking, "restart", self._model.restart)

    def _advance(self, each: _Absence) -> None:
        """Start the next cause of an island's absence, because the current one has ended."""
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
        """Handle a failure at the current time."""
        failure = self._draw_failure()
        hit = self._hit(failure)
        working = [island for island in hit if island not in self._away]
        # If all affected islands are already absent, the failure matters only if it takes down more
        # of their hosts.
        if not working and (not hit or failure.planned or failure.slowdown > 1):
            return
        self._record(failure)
        if failure.slowdown > 1:
            return
        if failure.planned:
            self._leave(working)
        else:
            self._fail(failure, hit, working)

    def _hit(self, failure: FailureClass) -> dict[int, int]:
        """Map each island that a failure hits to its number of failed units.

        Islands that wait for hosts are not included, because idle hosts do not fail.
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
        """Handle a planned stop of `islands`, which loses no work."""
        # If no island remains to provide the parameters, save a checkpoint so that no work is lost.
        if len(self._away) + len(islands) == self._model.islands:
            self._spend(self._model.save, {SAVE: self._model.save})
            self._kept = self._work
            self._written.clear()
        self._send_away(islands, "restart", self._model.restart)

    def _fail(self, failure: FailureClass, hit: dict[int, int], working: list[int]) -> None:
        """Handle a failure. The islands that it hits lose their work of the current round.

        If no island is left, the run loses all work done since its newest checkpoint.
        """
        detect = min(failure.detect, self._model.detect)
        # `_round` is the work of each island since the boundary, so scale it to the entire run.
        self._time.lose(self._round * len(working) / self._model.islands)
        self._send_away(working, "detection", detect)
        back = self._time.now
        if failure.repair:  # a single draw, because all hosts of a rack return together
            back += float(self._random.exponential(failure.repair))
        for island in hit:
            each = self._away[island]
            # A failure during a restart starts over with the detection.
            if each.cause in ("restart", "rejoining"):
                self._enter(each, "detection", detect)
            if failure.repair:
                self._take_away(each, hit[island], back)
        if working and not self._share:
            # No island is left, so return to the newest complete checkpoint.
            self._lose_unsaved_work()
            self._saves_in = self._rounds_between_saves
            for each in self._away.values():
                each.awaited = False

    def _send_away(self, islands: list[int], cause: str, seconds: float) -> None:
        until = self._time.now + seconds
        for island in islands:
            self._away[island] = _Absence(cause, until, awaited=cause == "detection")

    def _take_away(self, each: _Absence, units: int, back: float) -> None:
        """Send units of an island to repair until time `back`, and replace them with spares."""
        # Units that are already in repair cannot fail again.
        gone = min(units, self._units - each.missing)
        spares = min(gone, self._free)
        self._free -= spares
        each.missing += gone - spares
        for _ in range(gone):
            heapq.heappush(self._returns, back)
