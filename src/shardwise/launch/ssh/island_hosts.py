"""Runs a job of elastic islands on several hosts: each island is started, and meets, by itself.

    all hosts ready ─▶ each serves the others ─▶ each can reach each ─▶ islands start
    a host is lost  ─▶ its islands are left out ─▶ it is asked again and again ─▶ they come back

All happens in the event loop of the supervisor: what takes several messages is a generator, which
goes on whenever something has come.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from typing import Any

from shardwise.errors import LaunchError
from shardwise.launch import failure_report
from shardwise.launch.console import Console
from shardwise.launch.island_hub import Desk
from shardwise.launch.island_supervisor import IslandSupervisor
from shardwise.launch.job import Job
from shardwise.launch.signals import Signals
from shardwise.launch.ssh import agents, command, transfers
from shardwise.launch.ssh.agents import START_LIMIT, Agents
from shardwise.launch.ssh.command import SshOptions
from shardwise.launch.ssh.remote_desk import RemoteDesk
from shardwise.launch.ssh.remote_host import LAST_WAIT, RemoteHost
from shardwise.launch.ssh.remote_island import IslandHost, RemoteIsland, here
from shardwise.net.island_desk import Contribution, Key
from shardwise.net.restarts import Ending, Restarts

Pairs = Sequence[tuple[IslandHost, IslandHost]]

STALLED = 3.0
"""How many times the seconds of silence after which a host is lost a host may fail to fetch from
another one, while both are heard."""


PATIENT = 3.0
"""Seconds in which hosts may fail to reach each other before that is why a run does not start."""


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
        supervisor.every_turn.append(self.go_on)

    # -- the beginning --------------------------------------------------------------------

    def open(self) -> None:
        """Return when all hosts serve each other, or someone wants the run to end. Raises
        LaunchError with all that is wrong."""
        job, supervisor = self._job, self._supervisor
        remotes = self._agents.start(job.shares)
        agents.prepare(job, remotes, supervisor, listening=job.shares)
        if supervisor.is_asked:
            return
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
        # Who serves many at once turns some of them away, who ask again.
        patient = time.monotonic() + PATIENT
        for one, other in pairs:
            one.desk.forget_reached(other.share.first)
            one.desk.fetch((other.share.first, transfers.NOTHING), other.desk)
        try:
            while waiting := [pair for pair in pairs if not _has_reached(*pair)]:
                for host in {host for pair in pairs for host in pair}:
                    _see_no_fault(host, until)
                faults = [_unreachable(*pair) for pair in waiting if _reason(*pair)]
                if faults and time.monotonic() > patient:
                    raise LaunchError(command.refusals(faults))
                yield
        finally:
            for one, other in pairs:
                one.desk.settle((), [(other.share.first, transfers.NOTHING)])

    # -- islands --------------------------------------------------------------------------

    def start(self, island: int, returns: bool) -> RemoteIsland:
        """Start an island, as soon as all of its hosts are up."""
        ranks = self._hub.membership.ranks(island)
        hosts = [host for host in self._hosts if here(ranks, host)]
        made = RemoteIsland(island, ranks, hosts, self._supervisor, returns=returns)
        made.starts = self._starting(made)
        self._islands[island] = made
        return made

    def _starting(self, island: RemoteIsland) -> Iterator[None]:
        """Start an island; goes on whenever something has come."""
        first, job, number = island.hosts[0], self._job, island.number
        address = yield from self._meeting(island)
        while not island.can_start:  # a host was lost meanwhile
            address = yield from self._meeting(island)
        self._hub.link(island.ranks)
        where: dict[str, Any] = dict(first.desk.meetings[number])
        for host in island.hosts:
            assert host.remote.ready is not None
            words = tuple(host.remote.ready["command"])
            task = job.task(host.share, words, self._console, address=address, **where)
            host.desk.unstarted.pop(number, None)
            about = {"island": number, "count": job.elastic_islands, "returns": island.returns}
            host.remote.start_island(task, here(island.ranks, host), **about)

    def _meeting(self, island: RemoteIsland) -> Generator[None, None, str]:
        """Let the host of its first rank listen for an island, once all of its hosts are up; the
        address."""
        while not island.can_start:
            yield
        first, number = island.hosts[0], island.number
        assert first.remote.ready is not None
        first.desk.meetings.pop(number, None)
        address = str(first.remote.ready["address"])
        first.remote.send("listen", island=number, address=address)
        while island.can_start and number not in first.desk.meetings:
            yield
        return address

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
                        f"shardwise: {host.name} cannot be reached yet, and is asked again every "
                        f"{self._options.patience:g} s: {error}\n"
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
        late = until + LAST_WAIT
        while time.monotonic() < until or not (host.remote.has_ended or time.monotonic() > late):
            yield
        self._agents.forget(host.remote, until)

    def _asked_again(self, host: IslandHost) -> Iterator[None]:
        """Start another agent on a host, and let it serve. Raises LaunchError."""
        try:
            (host.remote,) = self._agents.start([host.share])
        except OSError as error:
            raise LaunchError(failure_report.os_error_sentence(error)) from None
        until = time.monotonic() + START_LIMIT
        yield from _until(host, "hello", until)
        remotes = [each.remote for each in self._hosts]
        agents.check(self._job, host.remote, remotes, listens=True)
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
        for lost; the one where `key` is, if others cannot fetch from there either."""
        if time.monotonic() - desk.stalls[key] < STALLED * self._options.patience:
            return
        up = [each for each in self._hosts if each.is_up and each.remote.fault is None]
        host = next((each for each in up if each.desk is desk), None)
        source = next((each for each in up if key[0] in each.share.numbers), None)
        if host is not None and source is not None:
            others = [each for each in up if each not in (host, source)]
            of_source = source.share.numbers
            blames_source = any(each.desk.cannot_fetch(of_source) for each in others) and not any(
                desk.cannot_fetch(each.share.numbers) for each in others
            )
            lost = source if blames_source else host
            lost.remote.give_up(_unreachable(host, source, why))


def _serves(remote: RemoteHost) -> bool:
    return remote.desk is not None and remote.desk.serving


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
