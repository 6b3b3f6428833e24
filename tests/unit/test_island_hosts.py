"""Islands on several hosts when some hosts are lost, for the launcher and for an agent."""

import json
import os
import selectors
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardwise.islands.elastic import hosts as island_hosts
from shardwise.islands.elastic import transfers
from shardwise.islands.elastic.agent import IslandAgent
from shardwise.islands.elastic.broker import Contribution, HostBroker
from shardwise.islands.elastic.exchanges import Exchanges
from shardwise.islands.elastic.hosts import IslandHosts
from shardwise.islands.elastic.membership import Membership
from shardwise.islands.elastic.remote import (
    IslandHost,
    IslandRemoteHost,
    RemoteBroker,
    RemoteIsland,
)
from shardwise.islands.elastic.workers import IslandWorkers
from shardwise.launch.console import Console
from shardwise.launch.failure_report import ExitStatus
from shardwise.launch.local_workers import RankExit
from shardwise.launch.run_spec import Meeting, RunSpec
from shardwise.launch.ssh import agents, protocol
from shardwise.launch.worker import WorkerStreams, program
from shardwise.net import network
from shardwise.net.hosts import Host, Share

SILENT = RunSpec(
    words=(),
    size=1,
    shares=(),
    folder="/",
    python="python",
    ssh=("sh", "-c", "exec cat > /dev/null", "ssh"),
)
"""An ssh that prints nothing, and ends when its input ends."""


class Ears:
    """Records the messages that the supervisor of islands of one rank receives."""

    def __init__(self, count: int = 3) -> None:
        self.selector = selectors.DefaultSelector()
        self.exchanges = Exchanges(Membership(count=count, size=1), lambda found: None)
        self.gone: list[tuple[list[int], str]] = []
        self.ends: list[int] = []
        self.every_turn: list[Any] = []
        self.not_begun: list[int] = []

    def lost(self, ranks: Sequence[int], why: str, after: float = 0.0) -> None:
        self.gone.append((list(ranks), why))
        for rank in ranks:
            self.exchanges.lose(rank)

    def left(self, rank_exit: RankExit) -> None:
        self.ends.append(rank_exit.end.rank)

    def not_started(self, ranks: Sequence[int]) -> None:
        self.not_begun += ranks


def share(number: int) -> Share:
    return Share(Host(f"no-such-host-{number}"), number, 1)


class Remote:
    """A host that is up, and records the messages that it is sent."""

    def __init__(self, number: int, ears: Ears) -> None:
        self.told: list[str] = []
        self.started: list[int] = []
        self.fault: str | None = None
        self.share = share(number)
        self.ready = {"address": f"10.0.0.{number}", "port": 1}
        self.ears = ears
        place = f"10.0.0.{number}", 1
        self.broker = RemoteBroker(self.send, ears.exchanges, place, lambda *given: None)

    def send(self, kind: str, **values: Any) -> None:
        self.told.append(kind)

    def start_island(self, meeting: Any, streams: Any, ranks: Sequence[int], **about: Any) -> None:
        self.started += ranks

    def ask_to_end(self, number: signal.Signals, part: int) -> None:
        self.told.append(number.name)

    def give_up(self, why: str) -> None:
        self.fault = why
        self.ears.lost([self.share.first], why)


class Hosts:
    """IslandHosts of `count` hosts that are up, with an island of one rank on each."""

    def __init__(self, count: int = 3) -> None:
        self.ears = Ears(count)
        job = replace(SILENT, parts=count)
        ears: Any = self.ears
        nothing: Any = None
        self.islands = IslandHosts(job, Console(1, {}), ears, nothing)
        self.remotes = [Remote(number, self.ears) for number in range(count)]
        found: list[Any] = [IslandHost(each.share, each) for each in self.remotes]  # type: ignore[arg-type]
        for host, remote in zip(found, self.remotes, strict=True):
            host.is_up = True
            remote.broker._failed = self.islands._stalled
            self.ears.exchanges.attach(remote.broker, [remote.share.first])
        self.islands._hosts = found

    def spread(self, number: int, *hosts: int) -> RemoteIsland:
        """Start an island on several hosts."""
        ears: Any = self.ears
        on = [self.islands._hosts[each] for each in hosts]
        ranks = range(hosts[0], hosts[-1] + 1)
        made = RemoteIsland(number, ranks, on, ears, returns=False)
        made.pending_start = self.islands._starting(made)
        self.islands._islands[number] = made
        return made


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    made = Hosts()
    with closing(made.ears.selector):
        yield made


@pytest.fixture
def remote() -> Iterator[IslandRemoteHost]:
    made = IslandRemoteHost(SILENT, share(0), lambda noise: None)
    with selectors.DefaultSelector() as selector:
        made.connect(selector)
        yield made
        made.close()
        made.wait(time.monotonic())


def serve(remote: IslandRemoteHost, ears: Ears) -> None:
    """Report that a host serves, and start the rank of its island."""
    where: Any = ears
    broker = RemoteBroker(remote.send, ears.exchanges, ("10.0.0.1", 1), lambda *given: None)
    remote.serve(broker, where, secret="s", ranks=1, islands=3)
    ears.exchanges.attach(broker, [0])
    ears.exchanges.link([0])
    remote._left.clear()


def end_of(rank: int) -> RankExit:
    end = ExitStatus(rank=rank, code=-9, time=time.time(), stopped=True)
    return RankExit(end=end, how="SIGKILL", report=None, progress=None, alone=True)


def test_ignores_messages_of_a_host_that_was_given_up(remote: IslandRemoteHost) -> None:
    """Its island may be starting again. The end of an earlier process is not one of the new
    process, and its contribution is ignored."""
    ears = Ears()
    serve(remote, ears)
    remote.give_up("it is lost")
    assert remote.broker is not None
    ears.exchanges.detach(remote.broker)
    rest = {"how": "", "report": None, "progress": None, "alone": True}
    end = {"rank": 0, "code": -9, "time": 1.0, "stopped": True}
    came = {"rank": 0, "number": 7, "size": 1, "label": "a", "alone": False, "resumes": True}
    remote._feed(
        protocol.encode("contribution", **came, data="") + protocol.encode("end", end=end, **rest)
    )
    assert ears.gone == [([0], "it is lost")]
    assert ears.ends == []
    ears.selector.close()


def test_message_to_a_stopped_agent_is_sent_later(tmp_path: Path) -> None:
    file, message = tmp_path / "read", {"rank": 0, "number": 1, "data": "x" * 2**20}
    ssh = ("sh", "-c", f"exec cat > {file}", "ssh")
    remote = IslandRemoteHost(replace(SILENT, ssh=ssh), share(0), lambda noise: None)
    with selectors.DefaultSelector() as selector:
        remote.connect(selector)
        os.kill(remote.group, signal.SIGSTOP)
        remote.send("keep", **message)
        assert remote._unsent
        os.kill(remote.group, signal.SIGCONT)
        while remote._unsent:
            for key, _ in selector.select(10):
                key.data()
        remote.close()
        remote.wait(time.monotonic())
    sent = protocol.encode("keep", **message) + protocol.encode("close")
    assert file.read_bytes() == sent


def children() -> set[str]:
    path = Path(f"/proc/self/task/{os.getpid()}/children")
    return set(path.read_text().split())


def test_asking_a_host_repeatedly_leaks_nothing() -> None:
    """No process or descriptor is left of each attempt, and its name is resolved once."""
    ears: Any = Ears()
    looked_up: list[Host] = []

    def look_up(host: Host) -> bool:
        looked_up.append(host)
        return False

    with closing(ears.selector), pytest.MonkeyPatch.context() as patch:
        patch.setattr(network, "is_here", look_up)
        patch.setattr("shardwise.launch.ssh.remote_host.FIRST_WAIT", 0.2)
        with agents.Agents(SILENT, ears, lambda noise: None, IslandRemoteHost) as started:
            first = started.start([share(0), share(1)])
            before, files = children(), len(os.listdir("/proc/self/fd"))
            for _ in range(3):
                (again,) = started.start([share(0)])
                again.close()
                started.forget(again, time.monotonic())
            assert children() == before
            assert len(os.listdir("/proc/self/fd")) == files
            for each in first:
                each.close()
                started.forget(each, time.monotonic())
            assert len(children()) < len(before) - 2
    assert looked_up == [share(0).host, share(1).host]


def test_host_is_lost_while_another_listens(hosts: Hosts) -> None:
    """The island does not start if no host would report the exit of its ranks."""
    island = hosts.spread(0, 0, 1)
    hosts.islands.resume()
    first, second = hosts.remotes[:2]
    assert first.told == ["listen"]
    first.broker.meetings[0] = {"port": 1, "master_port": 2}
    hosts.islands._hosts[1].is_up = False
    hosts.islands.resume()
    assert (first.started, second.started) == ([], [])
    hosts.islands._hosts[1].is_up = True
    hosts.islands.resume()
    assert first.told == ["listen", "listen"]
    first.broker.meetings[0] = {"port": 3, "master_port": 4}
    hosts.islands.resume()
    assert (first.started, second.started) == ([0], [1])
    assert island.pending_start is None


def test_run_is_asked_to_save_before_it_begins(hosts: Hosts) -> None:
    """The run starts, as on a single host. If it is asked to exit, it does not."""
    island = hosts.spread(0, 0, 1)
    island.ask_to_end(signal.SIGUSR1)
    assert island.pending_start is not None
    island.ask_to_end(signal.SIGTERM)
    assert island.pending_start is None
    assert hosts.ears.not_begun == [0, 1]


def cannot_fetch(hosts: Hosts, target: int, source: int, key: int = 1) -> None:
    """Report that a host cannot fetch a file of another host's rank."""
    broker = hosts.remotes[target].broker
    if (source, key) not in broker.stalls:
        broker.fetch((source, key), hosts.remotes[source].broker)
    broker._on_unfetched(source, key, "timed out")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    found = SimpleNamespace(now=100.0)
    found.monotonic = lambda: found.now
    monkeypatch.setattr(island_hosts, "time", found)
    monkeypatch.setattr("shardwise.islands.elastic.remote.time", found)
    return found


def test_loses_host_that_no_other_can_fetch_from(hosts: Hosts, clock: SimpleNamespace) -> None:
    """That host is lost, and not all others."""
    for _ in range(2):
        cannot_fetch(hosts, 0, 2)
        cannot_fetch(hosts, 1, 2)
        clock.now += 31
    assert [ranks for ranks, _ in hosts.ears.gone] == [[2]]
    assert "no-such-host-0 cannot fetch from no-such-host-2" in hosts.ears.gone[0][1]


def test_loses_host_that_cannot_fetch(hosts: Hosts, clock: SimpleNamespace) -> None:
    for _ in range(2):
        cannot_fetch(hosts, 0, 1)
        cannot_fetch(hosts, 0, 2)
        clock.now += 31
    assert hosts.ears.gone[0][0] == [0]


def test_old_failed_fetch_does_not_count(hosts: Hosts, clock: SimpleNamespace) -> None:
    """A dropped fetch does not count against later ones."""
    cannot_fetch(hosts, 0, 1, key=1)
    hosts.remotes[0].broker.settle((), [(1, 1)])
    hosts.remotes[0].broker._on_unfetched(1, 1, "it was on its way")
    clock.now += 1000
    cannot_fetch(hosts, 0, 1, key=2)
    hosts.remotes[0].broker._on_fetched(1, 2)
    clock.now += 1000
    cannot_fetch(hosts, 0, 1, key=3)
    assert hosts.ears.gone == []


def test_messages_of_a_rank_precede_its_end(tmp_path: Path) -> None:
    """Otherwise it would be mistaken for a message of the restarted rank."""
    said: list[str] = []
    made: list[IslandWorkers] = []
    selector = selectors.DefaultSelector()
    spec = RunSpec(words=(), size=2, shares=(share(0),))
    where = Meeting(address="", port=1, master_port=1)

    def run_part(part: int, meeting: Any, streams: Any, make: Any, listener: Any) -> None:
        nothing: Any = None
        sinks = nothing, lambda rank_exit: said.append("end"), nothing
        begin = program(["true"])
        about = spec, where, WorkerStreams(piped=False), begin, tmp_path
        made.append(make(*about, nothing, selector, *sinks))

    with socket.create_server(("127.0.0.1", 0)) as listener, ExitStack() as stack:
        stack.callback(selector.close)
        nothing: Any = None
        islands: Any = IslandAgent(nothing, stack)
        islands._selector, islands._listener = selector, listener
        islands._send = lambda kind, **_: said.append(kind)
        islands._run_part = run_part
        islands.on_serve("secret", 1, 2)
        islands.on_start_island({}, {}, island=0, count=2, returns=False)
        with closing(islands._broker.open(0)) as link:
            link.send(json.dumps({"back": True}).encode())
            ready = selector.select(1.0)
            made[0]._left(end_of(0))
            for key, _ in ready:
                key.data()
    assert said == ["serving", "end"]


def test_numbers_of_two_brokers_differ() -> None:
    """A file of a host's earlier broker is not mistaken for a file of its new broker."""
    found = []
    for _ in range(2):
        told: list[Contribution] = []
        ears: Any = SimpleNamespace(contribute=told.append)
        with (
            closing(selectors.DefaultSelector()) as selector,
            closing(HostBroker(selector, ears)) as broker,
        ):
            fd = os.memfd_create("brought")
            broker._take(0, {"label": "a", "alone": False, "resumes": False}, fd)
        found.append(told[0].key)
    assert found[0] != found[1]
    assert transfers.NOTHING not in {number for _, number in found}
