"""Watches elastic islands, which may fail and return while the others train.

    a rank of island k fails ─▶ no rank waits for k any more ─▶ its other ranks are killed
                             ─▶ k is restarted ─▶ the other islands admit it

A failure ends the run if not all islands have started training yet, if no other island is left, or
if the run was asked to stop.
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
from shardwise.islands.elastic.exchanges import Exchanges
from shardwise.islands.elastic.membership import Membership
from shardwise.launch import failure_report
from shardwise.launch.console import STDERR, STDOUT
from shardwise.launch.local_workers import RankExit
from shardwise.launch.supervisor import SETTLE, UNEXPLAINED, Site, Supervisor
from shardwise.net.error_file import ErrorReport
from shardwise.net.restarts import STUCK, Ending, Restarts

NEVER = math.inf


class IslandSite(Site, Protocol):
    """An island's ranks: IslandWorkers on this host, RemoteIsland on other hosts."""

    def end(self) -> None:
        """Kill the island's remaining processes."""

    def release(self) -> bool:
        """Return whether all of the island's processes are gone."""


Start = Callable[[int, bool], IslandSite]
"""Starts the island with the given index. The flag is True if it returns while others train."""


@dataclass
class IslandFailure:
    """How a failed island's ranks exited, and why some of them cannot be reached."""

    exits: dict[int, RankExit] = field(default_factory=dict)
    losses: list[str] = field(default_factory=list)

    @property
    def reports(self) -> dict[int, ErrorReport]:
        """The ranks' error reports, by rank."""
        values = {rank: each.report for rank, each in self.exits.items()}
        return {rank: report for rank, report in values.items() if report is not None}

    @property
    def step(self) -> int:
        """The number of steps that the island has completed."""
        values = [each.progress.step for each in self.exits.values() if each.progress is not None]
        return max(values, default=0)


class IslandSupervisor(Supervisor):
    """Watches elastic islands' ranks. An island may fail while the others train.

    Args:
        count: The number of islands.
        size: The number of ranks per island.
        restarts: Counts and limits the islands' restarts.
    """

    def __init__(
        self, *arguments: Any, count: int, size: int, restarts: Restarts, **options: Any
    ) -> None:
        super().__init__(*arguments, **options)
        self.exchanges = Exchanges(Membership(count=count, size=size), self._exchanged)
        self._size = size
        self._restarts = restarts
        self.islands: list[IslandSite] = []
        self._failing: dict[int, float] = {}
        """For each failing island, the time when its remaining ranks are killed."""
        self._failures: dict[int, IslandFailure] = {}
        """The failed islands that have not taken part in an exchange since."""
        self._outlived: set[int] = set()
        """Failed islands whose absence the others have survived, by completing an exchange."""
        self._tries: Counter[int] = Counter()
        """The number of restarts of each island since it last took part in an exchange."""
        self._finished: set[int] = set()
        """Islands whose ranks have all exited successfully."""
        self._said: set[int] = set()
        """Finished islands whose message has been printed."""
        self._unneeded: set[int] = set()
        """Failed islands that are killed because no island is left that could admit them."""
        self.ended: list[IslandSite] = []
        """Failed islands that may still have child processes."""

    def watch_islands(self, start: Start) -> Ending:
        """Start all islands and watch them until all ranks have exited.

        Returns how the run ended.
        """
        self._start = start
        self.islands += [start(island, False) for island in range(self._membership.count)]
        return self.watch(self.islands)

    @property
    def _membership(self) -> Membership:
        return self.exchanges.membership

    @property
    def _away(self) -> set[int]:
        """Islands that have failed, and have not taken part in an exchange since.

        A restarted island is included even after its admission, because it may still be loading.
        """
        return set(self._failures)

    def turn(self, limit: float | None = None) -> None:
        """Run one iteration of the event loop, and kill the failed islands that are due."""
        super().turn(limit)
        # Release them immediately: once the system reuses their process ids, the reaper would kill
        # unrelated processes.
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
        if rank not in self._running:  # its host was lost, and its island counts as failed
            return
        ended_well = rank_exit.end.code == 0 or rank_exit.saved
        at_fault = () if rank_exit.report is None else rank_exit.report.at_fault
        # A rank that blames another island has waited too long for it. That island hangs, and other
        # islands may hang too, so end the run.
        blames_another = not set(at_fault) <= set(self._membership.ranks(island))
        is_alone = not blames_another and self._are_alone([island])
        if island in self._failing or (not ended_well and is_alone):
            self._fail(island, [rank], rank_exit)
            return
        if not ended_well:
            self._recall()
        super().left(rank_exit)
        # A finished island stops taking part, like a failed one. But it does not count as failed,
        # so the run can still succeed.
        if ended_well and not self._living(island):
            self._finished.add(island)
            self.exchanges.lose(island)
        self._end_unneeded()

    def not_started(self, ranks: Sequence[int]) -> None:
        """Record that these ranks will not be started."""
        self._running.difference_update(ranks)

    def lost(self, ranks: Sequence[int], why: str, after: float = 0.0) -> None:
        islands = sorted({rank // self._size for rank in ranks if rank in self._running})
        if not self._are_alone([each for each in islands if each not in self._failing]):
            self._recall()
            super().lost(ranks, why, after)
            return
        # Mark all lost islands before reporting them: the message about one island must not say
        # that another lost island continues.
        for island in islands:
            self._begin_failing(island)
        for island in islands:
            self._fail(island, self._living(island) & set(ranks), why=why)

    def _living(self, island: int) -> set[int]:
        return self._running & set(self._membership.ranks(island))

    def _are_alone(self, islands: Collection[int]) -> bool:
        """Return whether the run can continue without `islands`, which have failed."""
        failed = set(islands)
        # Nobody waits for these islands, so their failure changes nothing.
        if failed <= self._unneeded:
            return True
        away = failed <= self._away
        if self._asked is not None or self._stopping:
            # The run is shutting down. Ignore only failures of islands that are away anyway.
            return away
        # If there is no other member, no weights are left to continue from.
        others = set(self._membership.members) - failed - set(self._failing)
        return self._membership.has_begun and bool(others or (away and self._finished))

    def _fail(
        self,
        island: int,
        ranks: Collection[int],
        rank_exit: RankExit | None = None,
        why: str | None = None,
    ) -> None:
        """Record that `ranks` have exited or cannot be reached, so that their island fails.

        `rank_exit` describes how a rank exited, and `why` the reason why ranks cannot be reached.
        """
        self._running.difference_update(ranks)
        self._begin_failing(island)
        failure = self._failures[island]
        if why is not None:  # no agent will report the end of their output
            for rank, stream in product(ranks, (STDOUT, STDERR)):
                self._outputs[rank].hear(stream, b"")
        if rank_exit is not None:
            failure.exits[rank_exit.end.rank] = rank_exit
        failure.losses += [] if why is None else [why]
        if not self._living(island):
            self._failed(island)
            return
        ends = [each.end for each in failure.exits.values()]
        # The other ranks may still report the cause of the failure, so kill them a little later.
        explained = failure.losses or failure_report.is_explained(ends, failure.reports)
        wait = SETTLE if explained else UNEXPLAINED
        self._failing[island] = min(self._failing[island], time.monotonic() + wait)

    def _begin_failing(self, island: int) -> None:
        """Remove `island` from the exchanges, so that no rank waits for it."""
        if island not in self._failing:
            self._failures[island] = IslandFailure()
            self._outlived.discard(island)
            self._failing[island] = NEVER
            self.exchanges.lose(island)

    def _failed(self, island: int) -> None:
        """Report that all of the island's ranks have exited, and restart the island if possible."""
        del self._failing[island]
        workers = self.islands[island]
        workers.end()  # kills the remaining child processes
        self.ended.append(workers)
        if island in self._unneeded or self._asked is not None or self._stopping:
            return
        others = [each for each in self._membership.members if each not in self._failing]
        if not others:  # `_conclude` reports the end of the run
            self._end_unneeded()
            return
        comes, what_next = self._next(island)
        failure = self._failures[island]
        at = f" at step {failure.step}" if failure.exits else ""
        listed = ", ".join(map(str, others))
        go_on = f"Islands {listed} continue" if others[1:] else f"Island {listed} continues"
        self.say(
            f"shardwise: island {island} has ended{at} ({self._cause(failure)}). "
            f"{go_on} without it from the next boundary on. {what_next}\n"
        )
        if comes:
            self._start_again(island)

    def _cause(self, failure: IslandFailure) -> str:
        """Return a phrase that names the rank at fault and the cause of the failure."""
        reports, exits = failure.reports, failure.exits
        verdict = failure_report.judge([each.end for each in exits.values()], reports)
        if verdict is None or (failure.losses and failure_report.is_consequence(verdict, reports)):
            return failure.losses[0].partition(". ")[0].removesuffix(".")
        count = len(self._outputs)
        report = reports.get(verdict.rank if verdict.waiting is None else verdict.waiting)
        what, why = failure_report.in_few_words(verdict, exits[verdict.rank].how, count, report)
        return f"{what}: {why.removesuffix('.')}"

    def _next(self, island: int) -> tuple[bool, str]:
        """Return whether to restart `island`, and a sentence for the user about it."""
        if island not in self.exchanges.resuming:
            return False, "It does not return, because the script calls no engine.resume(folder)."
        # Count restarts since the island last took part, so that an island that fails rarely is
        # always restarted.
        if self._tries[island] == STUCK:
            return False, f"It does not return, because {STUCK} restarts in a row have failed."
        if self._restarts.is_spent:
            limit = f"--restarts {self._restarts.allowed} allows no more restarts"
            return False, f"It does not return, because {limit}."
        return True, f"Restarting it ({self._restarts.number} of {self._restarts.allowed})."

    def _start_again(self, island: int) -> None:
        """Restart `island`. If it cannot be started, retry while restarts are left."""
        comes = True
        while comes:
            self._restarts.island_started()
            self._tries[island] += 1
            try:
                self.islands[island] = self._start(island, True)
            except (LaunchError, OSError) as error:
                self.exchanges.lose(island)
                comes, what_next = self._next(island)
                why = str(error).removesuffix(".")
                self.say(f"shardwise: island {island} could not start: {why}. {what_next}\n")
            else:
                self._running.update(self._membership.ranks(island))
                return

    # -- the others -------------------------------------------------------------------------

    def _exchanged(self, islands: Sequence[int]) -> None:
        """Record that `islands` took part in an exchange.

        Prints which islands have finished or returned since the last exchange.
        """
        for island in self._finished - self._said:
            self.say(f"shardwise: island {island} has finished. The others continue without it.\n")
        self._said |= self._finished
        for island in list(self._failures):
            if island not in islands:
                self._outlived.add(island)
            else:
                del self._failures[island]
                self._outlived.discard(island)
                self._tries[island] = 0
                step = self._membership.admitted[island]
                self.say(f"shardwise: island {island} has returned, from step {step} on.\n")

    def _end_unneeded(self) -> None:
        """Kill returning islands if no participating island is left to admit them."""
        taking_part = [rank for each in self._membership.members for rank in self._living(each)]
        # A returning island needs a running member to admit it.
        if taking_part or self._unneeded:
            return
        self._unneeded |= {each for each in self._away if self._living(each)}
        for island in self._unneeded:
            self.islands[island].end()

    def _recall(self) -> None:
        """Add the islands' failures to the possible causes of the run's failure."""
        # Exclude failures that the other islands have survived, because they did not end the run.
        for island, failure in self._failures.items():
            if island not in self._outlived:
                self._exits |= failure.exits
                self._losses += [each for each in failure.losses if each not in self._losses]

    def _conclude(self) -> Ending:
        if not self._finished:
            self._recall()
        return super()._conclude()
