"""Starts the ranks of one island that may end and come back by itself."""

from __future__ import annotations

import selectors
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from shardwise.launch import progress
from shardwise.launch.identity import Identity
from shardwise.launch.island_place import IslandPlace
from shardwise.launch.local_workers import Hear, HostTask, LocalWorkers, RankExit
from shardwise.launch.orphan_reaper import OrphanReaper
from shardwise.launch.worker import Worker, WorkerStreams

OpenLink = Callable[[int], socket.socket]
"""Makes the link of a rank to the launcher; returns the rank's end."""


class IslandWorkers(LocalWorkers):
    """The ranks of `task` that are of island `island` of `count`: they meet at its first one.

    `link` makes the link of each to the launcher; `returns`: the others have gone on without them.
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
        of_island = replace(task, first=island * size, count=size)
        super().__init__(of_island, folder, reaper, selector, hear, left, saves)
        self._island, self._count, self._link, self._returns = island, count, link, returns

    @property
    def _meets_at(self) -> int:
        return self._task.first

    def _start(
        self, worker: Worker, environ: dict[str, str], fds: list[int], outlet: WorkerStreams
    ) -> None:
        with self._link(worker.rank) as link:
            place = IslandPlace(
                island=self._island,
                count=self._count,
                size=self._task.count,
                fd=link.fileno(),
                returns=self._returns,
            )
            super()._start(worker, environ | place.variables(), [*fds, link.fileno()], outlet)

    def _identity(self, local_rank: int, listen_fd: int | None) -> Identity:
        """Who a rank is in the run; all islands are on this host."""
        found = super()._identity(local_rank, listen_fd)
        return replace(found, local_rank=found.rank, local_size=found.size)

    def ended_well(self, rank: int) -> None:
        """Ranks wait for those of their island alone, which they count from 0."""
        place = rank - self._task.first
        if 0 <= place < self._task.count:
            progress.mark_ended_early(self._folder, place)

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

    @property
    def step(self) -> int:
        """How many steps the ranks have made."""
        ranks = range(self._task.first, self._task.first + self._task.count)
        found = (progress.read(self._folder, rank) for rank in ranks)
        return max((each.step for each in found if each is not None), default=0)
