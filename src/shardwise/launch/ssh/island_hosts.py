"""Runs a job of elastic islands on several hosts: each island is started, and meets, by itself.

    all hosts ready ─▶ each serves the others ─▶ each can reach each ─▶ islands start
    a host is lost  ─▶ its islands are left out ─▶ it is asked again and again ─▶ they come back

All happens in the event loop of the supervisor: what takes several messages is a generator, which
goes on whenever something has come.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

from shardwise.errors import LaunchError
from shardwise.launch.console import Console
from shardwise.launch.hosts import LOOPBACK, Share
from shardwise.launch.island_desk import Contribution, Key
from shardwise.launch.island_hub import Desk
from shardwise.launch.island_place import ranks_here
from shardwise.launch.island_supervisor import IslandSupervisor
from shardwise.launch.job import Job
from shardwise.launch.restarts import Ending, Restarts
from shardwise.launch.signals import Signals
from shardwise.launch.ssh import agents, command, transfers
from shardwise.launch.ssh.agents import START_LIMIT, Agents
from shardwise.launch.ssh.command import SshOptions
from shardwise.launch.ssh.remote_desk import RemoteDesk
from shardwise.launch.ssh.remote_host import RemoteHost

Pairs = Sequence[tuple["IslandHost", "IslandHost"]]

STALLED = 3.0
"""How many times the seconds of silence after which a host is lost a host may fail to fetch from
another one, while both are heard."""


def once(
    job: Job, options: SshOptions, console: Console, signals: Signals, restarts: Restarts
) -> Ending:
    """Reach all hosts, start all islands, and watch them to the end of the run; islands that are
    started again count among `restarts`."""
    supervisor = IslandSupervisor(
        console,
        job.outputs(console),
        signals,
        grace=job.grace,
        joins=job.joins,
        hosts=agents.names(job.shares),
        count=job.elastic_islands,
        size=job.size // job.elastic_islands,
        restarts=restarts,
    )
    with closing(supervisor), Agents(options, supervisor, console.err.lines) as started:
        hosts = IslandHosts(job, options, console, supervisor, started)
        hosts.open()
        if supervisor.is_asked:
            return supervisor.watch(())
        return supervisor.watch_islands(hosts.start)


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


class IslandHosts:
    """The hosts of a job of elastic islands."""

    def __init__(
        self,
        job: Job,
        options: SshOptions,
        console: Console,
        supervisor: IslandSupervisor,
        started: Agents,
    ) -> None:
        self._job, self._options, self._console = job, options, console
        self._supervisor, self._agents = supervisor, started
        self._hub = supervisor.hub
        self._hub.transfers = self
        self._hosts: list[IslandHost] = []
        self._islands: dict[int, RemoteIsland] = {}
        self._towards = LOOPBACK
        supervisor.also = self.go_on

    # -- the beginning --------------------------------------------------------------------

    def open(self) -> None:
        """Return when all hosts serve each other, or someone wants the run to end. Raises
        LaunchError with all that is wrong."""
        job, supervisor = self._job, self._supervisor
        remotes = self._agents.start(job.shares)
        agents.prepare(job, remotes, supervisor, listening=job.shares)
        if supervisor.is_asked:
            return
        self._towards = next(filter(None, map(agents.address, remotes)), LOOPBACK)
        self._hosts = [IslandHost(remote.share, remote) for remote in remotes]
        for host in self._hosts:
            self._serve(host)
        agents.wait_for(remotes, supervisor, _serves)
        pairs = [(one, other) for one in self._hosts for other in self._hosts if one is not other]
        until = time.monotonic() + START_LIMIT
        for _ in self._reaching(pairs, until):
            if supervisor.is_asked:
                return
            supervisor.turn(1.0)
        for host in self._hosts:
            host.is_up = True

    def _serve(self, host: IslandHost) -> None:
        """Let a host that is ready serve the others."""
        ready, job = host.remote.ready, self._job
        assert ready is not None
        place = ready["address"], ready["port"]
        desk = RemoteDesk(host.remote.send, self._hub, place, self._stalled)
        count = job.elastic_islands
        host.remote.serve(
            desk, self._supervisor, secret=job.secret, ranks=host.share.count, islands=count
        )
        self._hub.attach(desk, host.share.numbers)

    def _reaching(self, pairs: Pairs, until: float) -> Iterator[None]:
        """Wait until of each pair the one has fetched nothing from the other. Raises LaunchError
        where one cannot."""
        for one, other in pairs:
            one.desk.forget_reached(other.share.first)
            one.desk.fetch((other.share.first, transfers.NOTHING), other.desk)
        try:
            while waiting := [pair for pair in pairs if not _has_reached(*pair)]:
                for host in {host for pair in pairs for host in pair}:
                    _see_no_fault(host, until)
                faults = [_unreachable(*pair) for pair in waiting if _reason(*pair)]
                if faults:
                    raise LaunchError(command.refusals(faults))
                yield
        finally:
            for one, other in pairs:
                one.desk.settle((), [(other.share.first, transfers.NOTHING)])

    # -- islands --------------------------------------------------------------------------

    def start(self, island: int, returns: bool) -> RemoteIsland:
        """Start an island, as soon as all of its hosts are up."""
        ranks = self._hub.membership.ranks(island)
        hosts = [host for host in self._hosts if _here(ranks, host)]
        made = RemoteIsland(island, ranks, hosts, self._supervisor)
        made.starts = self._starting(made, returns)
        self._islands[island] = made
        return made

    def _starting(self, island: RemoteIsland, returns: bool) -> Iterator[None]:
        """Start an island; goes on whenever something has come."""
        first, job, number = island.hosts[0], self._job, island.number
        while not all(host.is_up for host in island.hosts):
            yield
        assert first.remote.ready is not None
        first.desk.meetings.pop(number, None)
        address = first.remote.ready["address"]
        first.remote.send("listen", island=number, address=address)
        while number not in first.desk.meetings:
            if not all(host.is_up for host in island.hosts):
                yield from self._starting(island, returns)
                return
            yield
        self._hub.link(island.ranks)
        where: dict[str, Any] = dict(first.desk.meetings[number])
        for host in island.hosts:
            assert host.remote.ready is not None
            words = tuple(host.remote.ready["command"])
            task = job.task(host.share, words, self._console, address=address, **where)
            host.desk.unstarted.pop(number, None)
            about = {"island": number, "count": job.elastic_islands, "returns": returns}
            host.remote.start_island(task, _here(island.ranks, host), **about)

    # -- what goes on ---------------------------------------------------------------------

    def go_on(self) -> float | None:
        """See what has come, and what follows; seconds after which to look again, None where
        something has to come first."""
        for host in self._hosts:
            self._look_at(host)
        for island in list(self._islands.values()):
            island.go_on()
        return 1.0 if any(host.comes_up for host in self._hosts) else None

    def _look_at(self, host: IslandHost) -> None:
        if host.is_up and host.remote.fault is not None:
            host.is_up = False
            host.comes_up = self._coming_up(host)
        if host.comes_up is not None and next(host.comes_up, host) is host:
            host.comes_up = None

    def _coming_up(self, host: IslandHost) -> Iterator[None]:
        """Ask a host that was lost again and again, until it serves."""
        said = False
        while True:
            # What has run there ends by itself after so long, if we cannot end it.
            yield from self._replaced(host)
            try:
                yield from self._asked_again(host)
            except LaunchError as error:
                if not said:
                    self._supervisor.say(
                        f"shardwise: {host.name} cannot be reached yet: {error} It is asked again "
                        f"every {self._options.patience:g} s.\n"
                    )
                    said = True
            else:
                host.is_up = True
                return

    def _replaced(self, host: IslandHost) -> Iterator[None]:
        """End the agent that is there, and wait as long as what it started takes to end."""
        if host.remote.desk is not None:
            self._hub.detach(host.remote.desk)
        host.remote.close()
        until = time.monotonic() + self._options.patience
        while time.monotonic() < until:
            yield
        self._agents.forget(host.remote)

    def _asked_again(self, host: IslandHost) -> Iterator[None]:
        """Start another agent on a host, and let it serve. Raises LaunchError."""
        (host.remote,) = self._agents.start([host.share])
        until = time.monotonic() + START_LIMIT
        yield from _until(host, "hello", until)
        agents.check(self._job, host.remote, self._towards, listens=True)
        yield from _until(host, "ready", until)
        self._serve(host)
        while not host.desk.serving:
            _see_no_fault(host, until)
            yield
        pairs = [(host, other) for other in self._hosts if other.is_up]
        yield from self._reaching([*pairs, *((other, one) for one, other in pairs)], until)

    # -- what ranks bring -----------------------------------------------------------------

    def bring(self, what: Contribution, data: str | None, source: Desk, target: Desk) -> bool:
        """Let `target` have what the desk `source` has, of which `data` is all where it is little.
        Whether it has it at once."""
        assert isinstance(source, RemoteDesk)
        assert isinstance(target, RemoteDesk)
        if data is not None:
            target.keep(what.key, data)
        else:
            target.fetch(what.key, source)
        return data is not None

    def _stalled(self, desk: RemoteDesk, key: Key, why: str) -> None:
        """What is known by `key` could not be fetched at `desk`: after a while its host is taken
        for lost."""
        now = time.monotonic()
        if now - desk.stalls.setdefault(key, now) < STALLED * self._options.patience:
            return
        host = next((each for each in self._hosts if each.remote.desk is desk), None)
        source = next(each for each in self._hosts if key[0] in each.share.numbers)
        if host is not None and host.is_up and source.is_up:
            host.remote.give_up(_unreachable(host, source, why))


class RemoteIsland:
    """An island whose `ranks` run on `hosts`, or are about to; `starts` is what is left to do
    until they do."""

    def __init__(
        self,
        number: int,
        ranks: range,
        hosts: Sequence[IslandHost],
        supervisor: IslandSupervisor,
    ) -> None:
        self.number, self.ranks, self.hosts = number, ranks, hosts
        self.starts: Iterator[None] | None = None
        self._supervisor = supervisor

    def go_on(self) -> None:
        """Start it, as far as that can be done now; tell of what could not be started."""
        if self.starts is not None and next(self.starts, self) is self:
            self.starts = None
        for host in self.hosts:
            desk = host.remote.desk
            why = None if desk is None else desk.unstarted.pop(self.number, None)
            if why is not None:
                here = f"island {self.number} could not start on {host.name}: {why}"
                self._supervisor.lost(_here(self.ranks, host), here)

    def reap(self) -> None:
        """Do nothing: the agents report the ends of ranks."""

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to its ranks; those that have not started do not start."""
        if not self._given_up():
            for host in self.hosts:
                host.remote.send_signal(number, self.number)

    def ask_to_end(self, number: signal.Signals) -> None:
        """Pass on to its ranks that someone wants them to end."""
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


def _serves(remote: RemoteHost) -> bool:
    return remote.desk is not None and remote.desk.serving


def _here(ranks: range, host: IslandHost) -> range:
    """Those of an island's ranks that are on a host."""
    return ranks_here(ranks, host.share.first, host.share.count)


def _until(host: IslandHost, word: str, until: float) -> Iterator[None]:
    """Wait for a message of a host's agent. Raises LaunchError where it does not come."""
    while getattr(host.remote, word) is None:
        _see_no_fault(host, until)
        yield
    _see_no_fault(host, until)


def _see_no_fault(host: IslandHost, until: float) -> None:
    if host.remote.fault is not None:
        raise LaunchError(host.remote.fault)
    if time.monotonic() > until:
        raise LaunchError(f"{host.name} has not answered in {START_LIMIT:g} s.")


def _has_reached(one: IslandHost, other: IslandHost) -> bool:
    return other.share.first in one.desk.reached


def _reason(one: IslandHost, other: IslandHost) -> str:
    """Why one host could not fetch from another one last; "" where nothing is known."""
    return one.desk.unreached.get(other.share.first, "")


def _unreachable(one: IslandHost, other: IslandHost, why: str = "") -> str:
    address, port = other.desk.place
    return (
        f"{one.name} cannot fetch from {other.name}, at port {port} of {address}: "
        f"{why or _reason(one, other)}. Elastic islands send what they exchange from host to host: "
        "let hosts connect to each other, on one port with --port, or name the network that they "
        "share with --interface."
    )
