"""Watches islands that may end and come back by themselves, while the others go on.

    a rank of island k fails ─▶ nobody waits for k any more ─▶ its other ranks are ended ─▶ a line
                             ─▶ k is started again ─▶ the others admit it ─▶ a line

What is not one island's alone ends the run as it ends without: a failure before all have begun to
train, of the last island, or of a run that somebody asks to end.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Protocol

from shardwise.errors import LaunchError
from shardwise.launch import failure_report
from shardwise.launch.console import STDERR, STDOUT
from shardwise.launch.island_hub import IslandHub
from shardwise.launch.local_workers import RankExit
from shardwise.launch.supervisor import SETTLE, UNEXPLAINED, Site, Supervisor
from shardwise.net.error_file import ErrorReport
from shardwise.net.island_membership import Membership
from shardwise.net.restarts import STUCK, Ending, Restarts

NEVER = math.inf


class IslandSite(Site, Protocol):
    """The ranks of an island: IslandWorkers here, RemoteIsland on other hosts."""

    def end(self) -> None:
        """End all that is left of its ranks, at once."""

    def release(self) -> bool:
        """Whether nothing is left of it."""


Start = Callable[[int, bool], IslandSite]
"""Starts an island; whether it comes back to others that have gone on."""


@dataclass
class IslandFailure:
    """How the ranks of an island ended that failed, and why some of them are out of reach."""

    exits: dict[int, RankExit] = field(default_factory=dict)
    losses: list[str] = field(default_factory=list)

    @property
    def reports(self) -> dict[int, ErrorReport]:
        """What its ranks have reported."""
        found = {rank: each.report for rank, each in self.exits.items()}
        return {rank: report for rank, report in found.items() if report is not None}

    @property
    def step(self) -> int:
        """How many steps they have made."""
        found = [each.progress.step for each in self.exits.values() if each.progress is not None]
        return max(found, default=0)


class IslandSupervisor(Supervisor):
    """The ranks of `count` islands of `size` ranks each, of which one may end and the others go on;
    `restarts` says how often one is started again, and counts it."""

    def __init__(self, *given: Any, count: int, size: int, restarts: Restarts, **more: Any) -> None:
        super().__init__(*given, **more)
        self.hub = IslandHub(Membership(count=count, size=size), self._exchanged)
        self._size = size
        self._restarts = restarts
        self.islands: list[IslandSite] = []
        self._failing: dict[int, float] = {}
        """By island that fails: when its other ranks are ended."""
        self._failures: dict[int, IslandFailure] = {}
        """The islands that have failed, and have not taken part since."""
        self._outlived: set[int] = set()
        """Of these, those without which the others have gone on."""
        self._tries: Counter[int] = Counter()
        """How often an island was started again since it last took part."""
        self._finished: set[int] = set()
        """The islands all of whose ranks have ended well."""
        self._said: set[int] = set()
        """Of these, those of which it was said that the others go on."""
        self._unneeded: set[int] = set()
        self.ended: list[IslandSite] = []
        """Those whose ranks have ended, while some of what these had started may be left."""

    def watch_islands(self, start: Start) -> Ending:
        """Start all islands, and return how the run ended when all ranks have."""
        self._start = start
        self.islands += [start(island, False) for island in range(self._membership.count)]
        return self.watch(self.islands)

    @property
    def _membership(self) -> Membership:
        return self.hub.membership

    @property
    def _away(self) -> set[int]:
        """The islands that have failed, and have not taken part since: one that was let in may
        still load."""
        return set(self._failures)

    def turn(self, limit: float | None = None) -> None:
        """The same; islands that have failed are ended at their time."""
        super().turn(limit)
        # Others may get the numbers of their processes, which must not end with ours.
        self.ended = [each for each in self.ended if not each.release()]
        for island, at in list(self._failing.items()):
            if at <= time.monotonic():
                self._failing[island] = NEVER
                self.islands[island].end()

    def _waits(self) -> list[float | None]:
        waits, now = super()._waits(), time.monotonic()
        return waits + [max(0.0, at - now) for at in self._failing.values() if at < NEVER]

    # -- the end of a rank ------------------------------------------------------------------

    def left(self, rank_exit: RankExit) -> None:
        rank = rank_exit.end.rank
        island = rank // self._size
        if rank not in self._running:  # it was out of reach, and its island has failed
            return
        ended_well = rank_exit.end.code == 0 or rank_exit.saved
        is_alone = not self._blames_another(island, rank_exit.report) and self._are_alone([island])
        if island in self._failing or (not ended_well and is_alone):
            self._fail(island, [rank], rank_exit)
            return
        if not ended_well:
            self._recall()
        super().left(rank_exit)
        if ended_well and not self._living(island):
            self._finished.add(island)
            self.hub.lose(island)
        self._end_unneeded()

    def not_started(self, ranks: Sequence[int]) -> None:
        """Note that these ranks of an island, which was to start, do not."""
        self._running.difference_update(ranks)

    def lost(self, ranks: Sequence[int], why: str) -> None:
        islands = sorted({rank // self._size for rank in ranks if rank in self._running})
        if not self._are_alone([each for each in islands if each not in self._failing]):
            self._recall()
            super().lost(ranks, why)
            return
        for island in islands:
            self._begin_failing(island)
        for island in islands:
            self._fail(island, self._living(island) & set(ranks), why=why)

    def _living(self, island: int) -> set[int]:
        """The ranks of an island that run."""
        return self._running & set(self._membership.ranks(island))

    def _blames_another(self, island: int, report: ErrorReport | None) -> bool:
        """Whether a rank of `island` has waited too long for another one, which hangs."""
        at_fault = () if report is None else report.at_fault
        return not set(at_fault) <= set(self._membership.ranks(island))

    def _are_alone(self, islands: Collection[int]) -> bool:
        """Whether a failure of `islands` is their own: the others go on."""
        failed = set(islands)
        if failed <= self._unneeded:
            return True
        away = failed <= self._away
        if self._asked is not None or self._stopping:
            return away
        others = set(self._membership.members) - failed - set(self._failing)
        return self._membership.begun and bool(others or (away and self._finished))

    def _fail(
        self,
        island: int,
        ranks: Collection[int],
        rank_exit: RankExit | None = None,
        why: str | None = None,
    ) -> None:
        """Ranks of `island`, which goes down with them, have ended, or are out of reach."""
        self._running.difference_update(ranks)
        self._begin_failing(island)
        failure = self._failures[island]
        if why is not None:  # nobody tells of the end of what they wrote
            for rank, stream in product(ranks, (STDOUT, STDERR)):
                self._outputs[rank].hear(stream, b"")
        if rank_exit is not None:
            failure.exits[rank_exit.end.rank] = rank_exit
        failure.losses += [] if why is None else [why]
        if not self._living(island):
            self._failed(island)
            return
        ends = [each.end for each in failure.exits.values()]
        explained = failure.losses or failure_report.is_explained(ends, failure.reports)
        wait = SETTLE if explained else UNEXPLAINED
        self._failing[island] = min(self._failing[island], time.monotonic() + wait)

    def _begin_failing(self, island: int) -> None:
        """Nobody waits for `island` any more, as soon as something of it has failed."""
        if island not in self._failing:
            self._failures[island] = IslandFailure()
            self._outlived.discard(island)
            self._failing[island] = NEVER
            self.hub.lose(island)

    def _failed(self, island: int) -> None:
        """All ranks of `island` have ended: say so, and start it again where that is to be."""
        del self._failing[island]
        workers = self.islands[island]
        workers.end()  # what its ranks have started
        self.ended.append(workers)
        if island in self._unneeded or self._asked is not None or self._stopping:
            return
        others = [each for each in self._membership.members if each not in self._failing]
        if not others:  # as `_conclude` has it
            self._end_unneeded()
            return
        comes, what_next = self._next(island)
        failure = self._failures[island]
        self.say(
            f"shardwise: island {island} has ended{_at(failure)} ({self._cause(failure)}). "
            f"{_named(others)} without it, from the next boundary on. {what_next}\n"
        )
        if comes:
            self._start_again(island)

    def _cause(self, failure: IslandFailure) -> str:
        """Who of an island failed, and why."""
        reports, exits = failure.reports, failure.exits
        judged = failure_report.judge([each.end for each in exits.values()], reports)
        if judged is None or (failure.losses and failure_report.is_consequence(judged, reports)):
            return failure.losses[0].partition(". ")[0].removesuffix(".")
        count = len(self._outputs)
        found = reports.get(judged.rank if judged.waiting is None else judged.waiting)
        what, why = failure_report.in_few_words(judged, exits[judged.rank].how, count, found)
        return f"{what}: {why.removesuffix('.')}"

    def _next(self, island: int) -> tuple[bool, str]:
        """Whether `island` is started again, and what to say of it."""
        if island not in self.hub.resuming:
            return False, "It does not come back: the script calls no engine.resume(folder)."
        if self._tries[island] == STUCK:
            return False, f"It does not come back: it has failed {STUCK} times on its way."
        if self._restarts.is_spent:
            often = f"--restarts {self._restarts.allowed} allows no more"
            return False, f"It does not come back: {often}."
        return True, f"Starting it again, {self._restarts.number} of {self._restarts.allowed}."

    def _start_again(self, island: int) -> None:
        """Start `island`; that it cannot be started is a failure of it as any other."""
        comes = True
        while comes:
            self._restarts.island_started()
            self._tries[island] += 1
            try:
                self.islands[island] = self._start(island, True)
            except (LaunchError, OSError) as error:
                self.hub.lose(island)
                comes, what_next = self._next(island)
                why = str(error).removesuffix(".")
                self.say(f"shardwise: island {island} could not start: {why}. {what_next}\n")
            else:
                self._running.update(self._membership.ranks(island))
                return

    # -- the others -------------------------------------------------------------------------

    def _exchanged(self, islands: Sequence[int]) -> None:
        """These have taken part in an exchange."""
        for island in self._finished - self._said:
            self.say(f"shardwise: island {island} has ended well. The others go on without it.\n")
        self._said |= self._finished
        for island in list(self._failures):
            if island not in islands:
                self._outlived.add(island)
            else:
                del self._failures[island]
                self._outlived.discard(island)
                self._tries[island] = 0
                step = self._membership.admitted[island]
                self.say(f"shardwise: island {island} is back, from step {step} on.\n")

    def _end_unneeded(self) -> None:
        """End islands that are on their way back when nobody is there any more."""
        taking_part = [rank for each in self._membership.members for rank in self._living(each)]
        if taking_part or self._unneeded:
            return
        self._unneeded |= {each for each in self._away if self._living(each)}
        for island in self._unneeded:
            self.islands[island].end()

    def _recall(self) -> None:
        """The run fails: what has ended an island may be why, unless the others outlived it."""
        for island, failure in self._failures.items():
            if island not in self._outlived:
                self._exits |= failure.exits
                self._losses += [each for each in failure.losses if each not in self._losses]

    def _conclude(self) -> Ending:
        if not self._finished:
            self._recall()
        return super()._conclude()


def _at(failure: IslandFailure) -> str:
    """At which step an island has ended, as far as that is known."""
    return f" at step {failure.step}" if failure.exits else ""


def _named(islands: Sequence[int]) -> str:
    """The islands that go on, in words."""
    listed = ", ".join(map(str, islands))
    if len(islands) == 1:
        return f"Island {listed} goes on"
    return f"Islands {listed} go on"
