"""Starts the ranks of one island that may end and come back by itself."""

from __future__ import annotations

import math
import resource
import selectors
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from shardwise.errors import LaunchError
from shardwise.launch.local_workers import Hear, HostTask, LocalWorkers, RankExit
from shardwise.launch.orphan_reaper import OrphanReaper
from shardwise.launch.worker import Worker, WorkerStreams
from shardwise.net import progress
from shardwise.net.identity import Identity
from shardwise.net.island_place import IslandPlace, ranks_here

FILES_OF_A_RANK = 8
"""That who starts ranks holds open of each: its link, what it brought, its output and log."""

FILES = 64
"""That it holds open besides."""

OpenLink = Callable[[int], socket.socket]
"""Makes the link of a rank to where islands exchange; returns the rank's end."""


class IslandWorkers(LocalWorkers):
    """Those of the ranks of `task`, all of this host, that are of island `island` of `count`: they
    meet at its first one.

    `link` makes the link of each to where islands exchange; `returns`: the others have gone on
    without them.
    """

    def __init__(
        self,
        task: HostTask,
        folder: Path,
        reaper: OrphanReaper,
        selector: selectors.BaseSelector,
        hear: Hear,
        left: Callable[[RankExit], None],
        saves: Callable[[signal.Signals], None],
        *,
        island: int,
        count: int,
        link: OpenLink,
        returns: bool,
    ) -> None:
        size = task.size // count
        self._ranks = range(island * size, (island + 1) * size)
        self._host = task
        here = ranks_here(self._ranks, task.first, task.count)
        of_island = replace(task, first=here.start, count=len(here))
        super().__init__(of_island, folder, reaper, selector, hear, left, saves)
        self._island, self._count, self._link, self._returns = island, count, link, returns

    @property
    def _meets_at(self) -> int:
        return self._ranks.start

    def _start(
        self, worker: Worker, environ: dict[str, str], fds: list[int], outlet: WorkerStreams
    ) -> None:
        with self._link(worker.rank) as link:
            place = IslandPlace(
                island=self._island,
                count=self._count,
                size=len(self._ranks),
                fd=link.fileno(),
                returns=self._returns,
            )
            super()._start(worker, environ | place.variables(), [*fds, link.fileno()], outlet)

    def _identity(self, local_rank: int, listen_fd: int | None) -> Identity:
        """Who a rank is in the run: on its host are those of other islands too."""
        found, host = super()._identity(local_rank, listen_fd), self._host
        return replace(found, local_rank=found.rank - host.first, local_size=host.count)

    def ended_well(self, rank: int) -> None:
        """Ranks wait for those of their island alone, which they count from 0."""
        if rank in self._ranks:
            progress.mark_ended_early(self._folder, rank - self._ranks.start)

    def end(self) -> None:
        """End all that is left of the ranks, at once."""
        self.send_signal(signal.SIGKILL)

    def give_up(self) -> None:
        """End the ranks of a start that failed, of which nobody is to hear."""
        self.end()
        for worker in self._workers:
            while not worker.reap(stopped=True):
                time.sleep(0.01)
            for source in worker.sources:
                source.drain()
        self.release()


def allow_files(ranks: int, islands: int, kept: int = 0) -> None:
    """See to it that this process may pass on what is for `ranks` ranks, of `islands` islands, at
    once, and keep the files of `kept` islands for each. Raises LaunchError."""
    needed = ranks * (islands - 1 + kept + FILES_OF_A_RANK) + FILES
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (math.inf if each == resource.RLIM_INFINITY else each for each in limits)
    if soft >= needed:
        return
    if hard < needed:
        raise LaunchError(
            f"{ranks} workers of {islands} islands with --elastic-islands take {needed} open files "
            f"on their host, and {hard} are allowed there: raise that by `ulimit -n`, or take "
            "fewer islands."
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, limits[1]))
