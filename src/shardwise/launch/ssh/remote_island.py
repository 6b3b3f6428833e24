"""Holds the hosts of a run of elastic islands, and an island on them: the launcher's side."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence

from shardwise.launch.island_supervisor import IslandSupervisor
from shardwise.launch.ssh.remote_desk import RemoteDesk
from shardwise.launch.ssh.remote_host import RemoteHost
from shardwise.net.hosts import Share
from shardwise.net.island_place import ranks_here


class IslandHost:
    """The host of `share`, with its agent, which may be another one after it was lost. `is_up`
    says that islands can start there."""

    def __init__(self, share: Share, remote: RemoteHost) -> None:
        self.share = share
        self.remote = remote
        self.is_up = False
        self.comes_up: Iterator[None] | None = None
        """The way back of a host that was lost."""

    @property
    def name(self) -> str:
        """The host's name."""
        return self.share.host.name

    @property
    def desk(self) -> RemoteDesk:
        """Its desk, once it was asked to serve."""
        assert self.remote.desk is not None
        return self.remote.desk


class RemoteIsland:
    """An island whose `ranks` run on `hosts`, or are about to; `starts` is what is left to do
    until they do. `returns`: the others have gone on without it."""

    def __init__(
        self,
        number: int,
        ranks: range,
        hosts: Sequence[IslandHost],
        supervisor: IslandSupervisor,
        *,
        returns: bool,
    ) -> None:
        self.number, self.ranks, self.hosts = number, ranks, hosts
        self.returns = returns
        self.starts: Iterator[None] | None = None
        self._supervisor = supervisor

    @property
    def can_start(self) -> bool:
        """Whether all of its hosts are up."""
        return all(host.is_up for host in self.hosts)

    def go_on(self) -> None:
        """Start it, as far as that can be done now; tell of what could not be started."""
        if self.starts is not None and next(self.starts, self) is self:
            self.starts = None
        for host in self.hosts:
            desk = host.remote.desk
            why = None if desk is None else desk.unstarted.pop(self.number, None)
            if why is not None:
                said = f"island {self.number} could not start on {host.name}: {why}"
                self._supervisor.lost(here(self.ranks, host), said)

    def reap(self) -> None:
        """Do nothing: the agents report the ends of ranks."""

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to its ranks; those that have not started do not start."""
        if not self._given_up():
            for host in self.hosts:
                host.remote.send_signal(number, self.number)

    def ask_to_end(self, number: signal.Signals) -> None:
        """Pass on to its ranks that someone wants them to end."""
        if number == signal.SIGUSR1 and self.starts is not None and not self.returns:
            return  # there is nothing to save before a run has begun
        if not self._given_up():
            for host in self.hosts:
                host.remote.ask_to_end(number, self.number)

    def ended_well(self, rank: int) -> None:
        """Let its ranks know that `rank` ended with code 0."""
        if rank in self.ranks:
            for host in self.hosts:
                host.remote.ended_well(rank, self.number)

    def resize(self, window: tuple[int, int]) -> None:
        """Pass on the new rows and columns of the terminal."""
        for host in self.hosts:
            host.remote.resize(window)

    def end(self) -> None:
        """End all that is left of its ranks, at once."""
        self.send_signal(signal.SIGKILL)

    def release(self) -> bool:
        """Whether nothing is left of it: the agents see to that."""
        return True

    def _given_up(self) -> bool:
        """Whether it had not started, and does not now."""
        if self.starts is None:
            return False
        self.starts = None
        self._supervisor.not_started(self.ranks)
        return True


def here(ranks: range, host: IslandHost) -> range:
    """Those of an island's ranks that are on a host."""
    return ranks_here(ranks, host.share.first, host.share.count)
