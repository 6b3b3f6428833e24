"""Starts the ranks of one elastic island on one host."""

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
from shardwise.islands.elastic.membership import IslandPlace, ranks_here
from shardwise.launch.local_workers import Hear, LocalWorkers, RankExit
from shardwise.launch.orphan_reaper import OrphanReaper
from shardwise.launch.run_spec import Meeting, RunSpec
from shardwise.launch.worker import Begin, Worker, WorkerStreams
from shardwise.net import progress
from shardwise.net.identity import Identity

FILES_OF_A_RANK = 8
"""Files that the launcher or agent keeps open per rank: link, file of an exchange, output, log."""

FILES = 64
"""Files that it keeps open besides."""

OpenLink = Callable[[int], socket.socket]
"""Opens the link of a rank to the broker; returns the rank's end."""


class IslandWorkers(LocalWorkers):
    """Those of the ranks of `spec`, all of this host, that are of island `island` of `count`: they
    meet at its first one.

    `link` makes the link of each to where islands exchange; `returns`: the others have gone on
    without them.
    """

    def __init__(
        self,
        spec: RunSpec,
        meeting: Meeting,
        streams: WorkerStreams,
        begin: Begin,
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
        size = spec.size // count
        self._ranks = range(island * size, (island + 1) * size)
        self._host = spec.share
        here = ranks_here(self._ranks, self._host.first, self._host.count)
        of_island = spec.for_share(replace(self._host, first=here.start, count=len(here)))
        super().__init__(
            of_island, meeting, streams, begin, folder, reaper, selector, hear, left, saves
        )
        self._island, self._count, self._link, self._returns = island, count, link, returns

    @property
    def _meets_at(self) -> int:
        return self._ranks.start

    def _start(
        self, worker: Worker, environ: dict[str, str], fds: list[int], outlet: WorkerStreams
    ) -> None:
        # The rank inherits this end. Our copy is closed here, or the broker would never see the
        # end of the rank.
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
        """Return the identity of a rank in the run; its host has ranks of other islands too."""
        found, host = super()._identity(local_rank, listen_fd), self._host
        return replace(found, local_rank=found.rank - host.first, local_size=host.count)

    def ended_well(self, rank: int) -> None:
        """Pass on that `rank` has ended if it is of this island, whose ranks wait for no others."""
        if rank in self._ranks:
            progress.mark_ended_early(self._folder, rank - self._ranks.start)

    def end(self) -> None:
        """Kill the remaining processes of the ranks."""
        self.send_signal(signal.SIGKILL)

    def give_up(self) -> None:
        """Kill the ranks of a start that failed, without a report."""
        self.end()
        for worker in self._workers:
            while not worker.reap(stopped=True):
                time.sleep(0.01)
            for source in worker.sources:
                source.drain()
        self.release()


def allow_files(ranks: int, islands: int, kept: int = 0) -> None:
    """Raise this process's limit of open files to what an exchange takes.

    Args:
        ranks: Ranks of this host.
        islands: Islands of the run, of which each rank gets a file.
        kept: Islands whose files are kept for each rank.

    Raises LaunchError if the system does not allow it.
    """
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
