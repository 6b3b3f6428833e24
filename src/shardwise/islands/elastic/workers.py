"""Starts an elastic island's ranks on one host."""

from __future__ import annotations

import math
import resource
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from shardwise.errors import LaunchError
from shardwise.islands.elastic.membership import IslandPlace, ranks_here
from shardwise.launch.local_workers import LocalWorkers
from shardwise.launch.run_spec import RunSpec
from shardwise.launch.worker import Worker, WorkerStreams
from shardwise.net import progress
from shardwise.net.identity import Identity

FILES_OF_A_RANK = 8
"""Number of open files per rank in the launcher or agent: link, contribution, output, log."""

FILES = 64
"""Number of other open files in the launcher or agent."""

OpenLink = Callable[[int], socket.socket]
"""Opens a rank's link to the broker. Returns the rank's end of the socket."""


class IslandWorkers(LocalWorkers):
    """An island's ranks on this host. They connect to the island's first rank.

    Args:
        spec: The job, with all ranks of this host.
        local: The other arguments of `LocalWorkers`.
        island: The island's index.
        count: The number of islands.
        link: Opens a rank's link to the broker.
        returns: True if the other islands train without this one until they admit it.
    """

    def __init__(
        self, spec: RunSpec, *local: Any, island: int, count: int, link: OpenLink, returns: bool
    ) -> None:
        size = spec.size // count
        self._ranks = range(island * size, (island + 1) * size)
        self._host = spec.share
        here = ranks_here(self._ranks, self._host.first, self._host.count)
        share = replace(self._host, first=here.start, count=len(here))
        super().__init__(spec.for_share(share), *local)
        self._island, self._count, self._link, self._returns = island, count, link, returns

    @property
    def _meets_at(self) -> int:
        return self._ranks.start

    def _start(
        self, worker: Worker, environ: dict[str, str], fds: list[int], outlet: WorkerStreams
    ) -> None:
        # The rank inherits this end. Close our copy, or the broker would never notice that the rank
        # has exited.
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
        """Return a rank's identity. Local ranks are numbered across all islands on this host."""
        identity, host = super()._identity(local_rank, listen_fd), self._host
        return replace(identity, local_rank=identity.rank - host.first, local_size=host.count)

    def ended_well(self, rank: int) -> None:
        """Tell this island's ranks that `rank` exited with code 0, if `rank` is one of them.

        Ranks of other islands do not wait for it.
        """
        if rank in self._ranks:
            progress.mark_ended_early(self._folder, rank - self._ranks.start)

    def end(self) -> None:
        """Kill the island's remaining processes."""
        self.send_signal(signal.SIGKILL)

    def give_up(self) -> None:
        """Kill the ranks after a failed start, without reporting their exits."""
        self.end()
        for worker in self._workers:
            while not worker.reap(stopped=True):
                time.sleep(0.01)
            for source in worker.sources:
                source.drain()
        self.release()


def allow_files(ranks: int, islands: int, kept: int = 0) -> None:
    """Raise this process's limit on open files to the number that exchanges need.

    Args:
        ranks: The number of ranks on this host.
        islands: The number of islands. In an exchange, a rank receives one file from each.
        kept: The number of islands whose files are stored for each rank.

    Raises:
        LaunchError: The system does not allow this number of open files.
    """
    # An answer contains one file from each other island, for every rank at the same time.
    needed = ranks * (islands - 1 + kept + FILES_OF_A_RANK) + FILES
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (math.inf if each == resource.RLIM_INFINITY else each for each in limits)
    if soft >= needed:
        return
    if hard < needed:
        raise LaunchError(
            f"{ranks} workers of {islands} islands with --elastic-islands need {needed} open files "
            f"on their host, but only {hard} are allowed. Raise the limit with `ulimit -n`, or use "
            "fewer islands."
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, limits[1]))
