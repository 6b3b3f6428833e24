"""Runs elastic islands on several hosts: each island starts and meets by itself.

    all hosts ready ─▶ each serves the others ─▶ each can reach each ─▶ islands start
    a host is lost  ─▶ its islands are left out ─▶ it is asked again and again ─▶ they come back

Everything runs in the event loop of the supervisor. An operation that takes several messages is a
generator, which is resumed whenever a message has arrived.
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
    here,
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
"""The module that runs on each host."""

STALLED = 3.0
"""Multiple of `--host-timeout` for which a host may fail to fetch from another one."""


PATIENT = 3.0
"""Seconds for which hosts may fail to reach each other before the start of a run is given up."""


def once(job: RunSpec, console: Console, signals: Signals, restarts: Restarts) -> Ending:
    """Reach all hosts, start all islands, and watch them to the end of the run. Starts of single
    islands count in `restarts`."""
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
    with closing(supervisor), Agents(job, supervisor, console.lines, IslandRemoteHost) as started:
        hosts = IslandHosts(job, console, supervisor, started)
        hosts.open()
        if supervisor.is_asked:
            return supervisor.watch(())
        return supervisor.watch_islands(hosts.start)


class IslandHosts:
    """The hosts of a run of elastic islands."""

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
        supervisor.every_turn.append(self.go_on)

    # -- the beginning --------------------------------------------------------------------

    def open(self) -> None:
        """Wait until all hosts serve each other, or someone asks the run to end. Raises LaunchError
        with all that is wrong."""
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
        # Before any island starts, so that a firewall between two hosts costs no work.
        pairs = [(one, other) for one in self._hosts for other in self._hosts if one is not other]
        until = time.monotonic() + START_LIMIT
        for _ in self._reaching(pairs, until):
            if supervisor.is_asked:
                return
            supervisor.turn(1.0)
        for host in self._hosts:
            host.is_up = True

    def _serve(self, host: IslandHost) -> None:
        """Start the server of a host that is ready."""
        ready, job = host.remote.ready, self._job
        assert ready is not None
        place = ready["address"], ready["port"]
        broker = RemoteBroker(host.remote.send, self._exchanges, place, self._stalled)
        host.remote.serve(
            broker, self._supervisor, secret=job.secret, ranks=host.share.count, islands=job.parts
        )
        self._exchanges.attach(broker, host.share.numbers)

    def _reaching(self, pairs: Pairs, until: float) -> Iterator[None]:
        """Wait until the first host of each pair can fetch from the second. Raises LaunchError if
        one cannot."""
        # Not at the first failure: a host that serves many at once rejects some, who ask again.
        patient = time.monotonic() + PATIENT
        for one, other in pairs:
            one.broker.forget_reached(other.share.first)
            one.broker.fetch((other.share.first, transfers.NOTHING), other.broker)
        try:
            while waiting := [
                (one, other) for one, other in pairs if other.share.first not in one.broker.reached
            ]:
                for host in {host for pair in pairs for host in pair}:
                    _see_no_fault(host, until)
                faults = [_unreachable(*pair) for pair in waiting if _reason(*pair)]
                if faults and time.monotonic() > patient:
                    raise LaunchError(command.refusals(faults))
                yield
        finally:
            # Also after a failure: an agent repeats a fetch until it is dropped.
            for one, other in pairs:
                one.broker.settle((), [(other.share.first, transfers.NOTHING)])

    # -- islands --------------------------------------------------------------------------

    def start(self, island: int, returns: bool) -> RemoteIsland:
        """Start an island as soon as all of its hosts are up."""
        ranks = self._exchanges.membership.ranks(island)
        hosts = [host for host in self._hosts if here(ranks, host)]
        made = RemoteIsland(island, ranks, hosts, self._supervisor, returns=returns)
        made.starts = self._starting(made)
        self._islands[island] = made
        return made

    def _starting(self, island: RemoteIsland) -> Iterator[None]:
        """Start an island; resumed whenever a message has arrived."""
        first, job, number = island.hosts[0], self._job, island.number
        address = yield from self._meeting(island)
        # A host may have been lost while the first one opened the socket. Its new agent knows
        # nothing of it, so the island meets again.
        while not island.can_start:
            address = yield from self._meeting(island)
        self._exchanges.link(island.ranks)
        ports = first.broker.meetings[number]
        where = Meeting(address=address, port=ports["port"], master_port=ports["master_port"])
        for host in island.hosts:
            host.broker.unstarted.pop(number, None)
            about = {"island": number, "count": job.parts, "returns": island.returns}
            host.remote.start_island(
                where, job.streams(self._console), here(island.ranks, host), **about
            )

    def _meeting(self, island: RemoteIsland) -> Generator[None, None, str]:
        """Let the host of the first rank of an island listen, once all of its hosts are up; return
        the address."""
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

    # -- what goes on ---------------------------------------------------------------------

    def go_on(self) -> float | None:
        """Resume all operations; return the seconds until the next call, None to wait for a
        message."""
        for host in self._hosts:
            if host.is_up and host.remote.fault is not None:
                host.is_up = False
                host.comes_up = self._coming_up(host)
            if host.comes_up is not None and next(host.comes_up, host) is host:
                host.comes_up = None
        for island in list(self._islands.values()):
            island.go_on()
        return 1.0 if any(host.comes_up for host in self._hosts) else None

    def _coming_up(self, host: IslandHost) -> Iterator[None]:
        """Ask a lost host again and again, until it serves."""
        said = False
        while True:
            # First the end of the old agent: its ranks hold the accelerators, and end by themselves
            # after `--host-timeout` seconds if the host cannot be reached.
            yield from self._replaced(host)
            try:
                yield from self._asked_again(host)
            except LaunchError as error:
                if not said:
                    self._supervisor.say(
                        f"shardwise: {host.name} cannot be reached yet, and is asked again every "
                        f"{self._job.patience:g} s: {error}\n"
                    )
                    said = True
            else:
                host.is_up = True
                return

    def _replaced(self, host: IslandHost) -> Iterator[None]:
        """End the agent of a host, and wait until its ranks have ended too."""
        if host.remote.broker is not None:
            self._exchanges.detach(host.remote.broker)
        host.remote.close()
        until = time.monotonic() + self._job.patience
        late = until + LAST_WAIT
        while time.monotonic() < until or not (host.remote.has_ended or time.monotonic() > late):
            yield
        self._agents.forget(host.remote, until)

    def _asked_again(self, host: IslandHost) -> Iterator[None]:
        """Start a new agent on a host, and its server. Raises LaunchError."""
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
        pairs = [(host, other) for other in self._hosts if other.is_up]
        yield from self._reaching([*pairs, *((other, one) for one, other in pairs)], until)

    # -- what ranks bring -----------------------------------------------------------------

    def bring(self, what: Contribution, data: str | None, source: Broker, target: Broker) -> bool:
        """Copy a contribution from the broker `source` to `target`; `data` is all of it if it is
        little. Return whether `target` has it at once."""
        assert isinstance(source, RemoteBroker)
        assert isinstance(target, RemoteBroker)
        if data is not None:
            target.keep(what.key, data)
        else:
            target.fetch(what.key, source)
        return data is not None

    def _stalled(self, broker: RemoteBroker, key: Key, why: str) -> None:
        """Note that `broker` could not fetch the file `key`. After a while its host counts as lost,
        or the host of the file if others cannot fetch from there either."""
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
            lost = source if blames_source else host
            lost.remote.give_up(_unreachable(host, source, why))


def _until(host: IslandHost, word: str, until: float) -> Iterator[None]:
    """Wait for a message of a host's agent. Raises LaunchError if it does not arrive."""
    while getattr(host.remote, word) is None:
        _see_no_fault(host, until)
        yield
    _see_no_fault(host, until)


def _see_no_fault(host: IslandHost, until: float) -> None:
    if host.remote.fault is not None:
        raise LaunchError(host.remote.fault)
    if time.monotonic() > until:
        raise LaunchError(f"{host.name} has not answered in {START_LIMIT:g} s.")


def _reason(one: IslandHost, other: IslandHost) -> str:
    """Return why one host could not fetch from another one last, "" if it has not failed."""
    return one.broker.unreached.get(other.share.first, "")


def _unreachable(one: IslandHost, other: IslandHost, why: str = "") -> str:
    address, port = other.broker.place
    return (
        f"{one.name} cannot fetch from {other.name}, at port {port} of {address}: "
        f"{why or _reason(one, other)}. Elastic islands send what they exchange from host to host: "
        "let hosts connect to each other, on one port with --port, or name the network that they "
        "share with --interface."
    )
