"""Runs elastic islands on several hosts. The ranks of each island start and connect separately.

    all hosts ready ─▶ each serves the others ─▶ all can reach each other ─▶ islands start
    a host is lost  ─▶ its islands are removed ─▶ it is polled until it responds ─▶ they return

Everything runs in the supervisor's event loop. An operation that waits for several messages is a
generator, which is resumed after each message.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import replace

from shardwise.errors import LaunchError
from shardwise.islands.elastic import transfers
from shardwise.islands.elastic.broker import Contribution, Key
from shardwise.islands.elastic.exchanges import Broker
from shardwise.islands.elastic.remote import (
    IslandHost,
    IslandRemoteHost,
    RemoteBroker,
    RemoteIsland,
    ranks_on_host,
)
from shardwise.islands.elastic.supervisor import IslandSupervisor
from shardwise.launch import failure_report
from shardwise.launch.console import Console
from shardwise.launch.run_spec import Meeting, RunSpec
from shardwise.launch.signals import Signals
from shardwise.launch.ssh import agents, command
from shardwise.launch.ssh.agents import START_LIMIT, Agents
from shardwise.launch.ssh.remote_host import LAST_WAIT
from shardwise.net.restarts import Ending, Restarts

Pairs = Sequence[tuple[IslandHost, IslandHost]]

AGENT = "shardwise.islands.elastic.agent"
"""The module of the agent that runs on each host."""

STALLED = 3.0
"""A host may fail to fetch from another host for this multiple of `--host-timeout`."""


PATIENT = 3.0
"""Seconds to wait for hosts to reach each other before the start of a run fails."""


def once(job: RunSpec, console: Console, signals: Signals, restarts: Restarts) -> Ending:
    """Connect to all hosts, start all islands, and watch them until the run ends.

    `restarts` counts and limits the islands' restarts.
    """
    supervisor = IslandSupervisor(
        console,
        job.outputs(console),
        signals,
        grace=job.grace,
        joins=job.joins,
        hosts=agents.names(job.shares),
        count=job.parts,
        size=job.size // job.parts,
        restarts=restarts,
    )
    job = replace(job, agent=AGENT)
    with (
        closing(supervisor),
        Agents(job, supervisor, console.lines, IslandRemoteHost) as running_agents,
    ):
        hosts = IslandHosts(job, console, supervisor, running_agents)
        hosts.open()
        if supervisor.is_asked:
            return supervisor.watch(())
        return supervisor.watch_islands(hosts.start)


class IslandHosts:
    """Starts the hosts of a run with elastic islands, and recovers lost hosts."""

    def __init__(
        self,
        job: RunSpec,
        console: Console,
        supervisor: IslandSupervisor,
        started: Agents[IslandRemoteHost],
    ) -> None:
        self._job, self._console = job, console
        self._supervisor, self._agents = supervisor, started
        self._exchanges = supervisor.exchanges
        self._exchanges.transfers = self
        self._hosts: list[IslandHost] = []
        self._islands: dict[int, RemoteIsland] = {}
        supervisor.every_turn.append(self.resume)

    # -- the beginning --------------------------------------------------------------------

    def open(self) -> None:
        """Start all hosts' agents, and wait until the hosts can fetch files from each other.

        Returns early if the run is asked to stop. If a host cannot be used, raises a LaunchError
        that lists all problems.
        """
        job, supervisor = self._job, self._supervisor
        remotes = self._agents.start(job.shares)
        agents.prepare(job, remotes, supervisor, listening=job.shares)
        if supervisor.is_asked:
            return
        self._hosts = [IslandHost(remote.share, remote) for remote in remotes]
        for host in self._hosts:
            self._serve(host)
        agents.wait_for(
            remotes,
            supervisor,
            lambda remote: remote.broker is not None and remote.broker.serving,
        )
        # Check connections before any island starts, so that a firewall between two hosts wastes no
        # work.
        pairs = [
            (client, server)
            for client in self._hosts
            for server in self._hosts
            if client is not server
        ]
        until = time.monotonic() + START_LIMIT
        # The pairs include both directions, because a firewall may block only one of them.
        for _ in self._reaching(pairs, until):
            if supervisor.is_asked:
                return
            supervisor.turn(1.0)
        for host in self._hosts:
            host.is_up = True

    def _serve(self, host: IslandHost) -> None:
        """Start the broker and the file server of a host that is ready."""
        ready, job = host.remote.ready, self._job
        assert ready is not None
        place = ready["address"], ready["port"]
        broker = RemoteBroker(host.remote.send, self._exchanges, place, self._stalled)
        host.remote.serve(
            broker, self._supervisor, secret=job.secret, ranks=host.share.count, islands=job.parts
        )
        self._exchanges.attach(broker, host.share.numbers)

    def _reaching(self, pairs: Pairs, until: float) -> Iterator[None]:
        """Wait until the first host in each pair can fetch from the second.

        Raises LaunchError if a first host cannot fetch.
        """
        # Do not raise at the first failure: a host that serves many others at once rejects some,
        # which then try again.
        patient = time.monotonic() + PATIENT
        for client, server in pairs:
            client.broker.forget_reached(server.share.first)
            client.broker.fetch((server.share.first, transfers.NOTHING), server.broker)
        try:
            while waiting := [
                (client, server)
                for client, server in pairs
                if server.share.first not in client.broker.reached
            ]:
                for host in {host for pair in pairs for host in pair}:
                    _see_no_fault(host, until)
                faults = [_unreachable(*pair) for pair in waiting if _reason(*pair)]
                if faults and time.monotonic() > patient:
                    raise LaunchError(command.refusals(faults))
                yield
        finally:
            # Do this after a failure too, because an agent repeats a fetch until the file is
            # dropped.
            for client, server in pairs:
                client.broker.settle((), [(server.share.first, transfers.NOTHING)])

    # -- islands --------------------------------------------------------------------------

    def start(self, island: int, returns: bool) -> RemoteIsland:
        """Start an island as soon as all of its hosts are up.

        `returns` is True if other islands are already training.
        """
        ranks = self._exchanges.membership.ranks(island)
        hosts = [host for host in self._hosts if ranks_on_host(ranks, host)]
        site = RemoteIsland(island, ranks, hosts, self._supervisor, returns=returns)
        site.pending_start = self._starting(site)
        self._islands[island] = site
        return site

    def _starting(self, island: RemoteIsland) -> Iterator[None]:
        """Start an island. This generator is resumed after each message."""
        first, job, number = island.hosts[0], self._job, island.number
        address = yield from self._meeting(island)
        # A host may have been lost while the first host opened the socket. Its new agent does not
        # know the island, so open the socket again.
        while not island.can_start:
            address = yield from self._meeting(island)
        # Do this before the ranks start, because their first messages may arrive immediately.
        self._exchanges.link(island.ranks)
        ports = first.broker.meetings[number]
        where = Meeting(address=address, port=ports["port"], master_port=ports["master_port"])
        for host in island.hosts:
            host.broker.unstarted.pop(number, None)
            about = {"island": number, "count": job.parts, "returns": island.returns}
            host.remote.start_island(
                where, job.streams(self._console), ranks_on_host(island.ranks, host), **about
            )

    def _meeting(self, island: RemoteIsland) -> Generator[None, None, str]:
        """Open the listening socket for an island's rendezvous, once all of its hosts are up.

        The host of the island's first rank listens. Returns its address.
        """
        while not island.can_start:
            yield
        first, number = island.hosts[0], island.number
        assert first.remote.ready is not None
        first.broker.meetings.pop(number, None)
        address = str(first.remote.ready["address"])
        first.remote.send("listen", island=number, address=address)
        while island.can_start and number not in first.broker.meetings:
            yield
        return address

    # -- during the run -------------------------------------------------------------------

    def resume(self) -> float | None:
        """Resume all pending starts and recoveries.

        Returns the number of seconds until the next call, or None to wait for a message.
        """
        for host in self._hosts:
            # The host was lost since the last iteration.
            if host.is_up and host.remote.fault is not None:
                host.is_up = False
                host.recovery = self._coming_up(host)
            if host.recovery is not None and next(host.recovery, host) is host:
                host.recovery = None
        for island in list(self._islands.values()):
            island.resume()
        return 1.0 if any(host.recovery for host in self._hosts) else None

    def _coming_up(self, host: IslandHost) -> Iterator[None]:
        """Restart a lost host's agent, retrying until the host serves again."""
        is_reported = False
        while True:
            # First wait for the old agent to exit, because its ranks occupy the accelerators. If
            # the host cannot be reached, they exit after `--host-timeout` seconds.
            yield from self._replaced(host)
            try:
                yield from self._asked_again(host)
            except LaunchError as error:
                if not is_reported:
                    self._supervisor.say(
                        f"shardwise: {host.name} cannot be reached yet. Trying again every "
                        f"{self._job.patience:g} s: {error}\n"
                    )
                    is_reported = True
            else:
                host.is_up = True
                return

    def _replaced(self, host: IslandHost) -> Iterator[None]:
        """Close the connection to a host's agent, and wait until its ranks have exited too."""
        if host.remote.broker is not None:
            self._exchanges.detach(host.remote.broker)
        host.remote.close()
        until = time.monotonic() + self._job.patience
        late = until + LAST_WAIT
        while time.monotonic() < until or not (host.remote.has_ended or time.monotonic() > late):
            yield
        self._agents.forget(host.remote, until)

    def _asked_again(self, host: IslandHost) -> Iterator[None]:
        """Start a new agent and its file server. Raise LaunchError if the host is unreachable."""
        try:
            (host.remote,) = self._agents.start([host.share])
        except OSError as error:
            raise LaunchError(failure_report.os_error_sentence(error)) from None
        until = time.monotonic() + START_LIMIT
        yield from _until(host, "hello", until)
        remotes = [each.remote for each in self._hosts]
        agents.check(host.remote, remotes, listens=True)
        yield from _until(host, "ready", until)
        self._serve(host)
        while not host.broker.serving:
            _see_no_fault(host, until)
            yield
        pairs = [(host, server) for server in self._hosts if server.is_up]
        yield from self._reaching([*pairs, *((server, client) for client, server in pairs)], until)

    # -- contributions --------------------------------------------------------------------

    def bring(self, what: Contribution, data: str | None, source: Broker, target: Broker) -> bool:
        """Copy a contribution from the broker `source` to the broker `target`.

        `data` is the file's content if the file is small, otherwise None. Returns True if `target`
        has the file on return.
        """
        assert isinstance(source, RemoteBroker)
        assert isinstance(target, RemoteBroker)
        if data is not None:
            target.keep(what.key, data)
        else:
            target.fetch(what.key, source)
        return data is not None

    def _stalled(self, broker: RemoteBroker, key: Key, why: str) -> None:
        """Record that `broker` could not fetch the file `key`.

        After a while the broker's host is declared lost. If other hosts cannot fetch from the
        file's host either, the file's host is declared lost instead.
        """
        if time.monotonic() - broker.stalls[key] < STALLED * self._job.patience:
            return
        up = [each for each in self._hosts if each.is_up and each.remote.fault is None]
        host = next((each for each in up if each.broker is broker), None)
        source = next((each for each in up if key[0] in each.share.numbers), None)
        if host is not None and source is not None:
            others = [each for each in up if each not in (host, source)]
            of_source = source.share.numbers
            blames_source = any(each.broker.cannot_fetch(of_source) for each in others) and not any(
                broker.cannot_fetch(each.share.numbers) for each in others
            )
            lost_host = source if blames_source else host
            lost_host.remote.give_up(_unreachable(host, source, why))


def _until(host: IslandHost, word: str, until: float) -> Iterator[None]:
    """Wait until the agent has sent the message `word`.

    Raises LaunchError if the message has not arrived by the monotonic time `until`.
    """
    while getattr(host.remote, word) is None:
        _see_no_fault(host, until)
        yield
    _see_no_fault(host, until)


def _see_no_fault(host: IslandHost, until: float) -> None:
    if host.remote.fault is not None:
        raise LaunchError(host.remote.fault)
    if time.monotonic() > until:
        raise LaunchError(f"{host.name} has not answered for {START_LIMIT:g} s.")


def _reason(client: IslandHost, server: IslandHost) -> str:
    """Return why `client`'s last fetch from `server` failed, or "" if it succeeded."""
    return client.broker.unreached.get(server.share.first, "")


def _unreachable(client: IslandHost, server: IslandHost, why: str = "") -> str:
    address, port = server.broker.place
    return (
        f"{client.name} cannot fetch from {server.name}, at port {port} of {address}: "
        f"{why or _reason(client, server)}. Elastic islands send data directly between hosts. "
        "Allow connections between them, on a fixed port with --port, or name a network that they "
        "share with --interface."
    )
