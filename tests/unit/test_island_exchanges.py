"""Links between the launcher and ranks of islands, at both ends, and with errors of the system."""

import errno
import json
import os
import random
import resource
import selectors
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from itertools import count
from threading import Event, Thread
from typing import Any, NoReturn

import pytest

from shardwise.errors import CollectiveError, LaunchError
from shardwise.islands.elastic import link as island_link
from shardwise.islands.elastic.broker import Contribution, Delivery, HostBroker, Key
from shardwise.islands.elastic.exchanges import Broker, Exchanges
from shardwise.islands.elastic.link import IslandLink
from shardwise.islands.elastic.membership import IslandPlace, Membership
from shardwise.islands.elastic.workers import allow_files

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")


@contextmanager
def no_more_files() -> Iterator[None]:
    """Forbid this process to open another file inside the block."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


class Hub:
    """The exchanges of two islands with one rank each, and the ranks' ends of the links."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self.answered: list[Sequence[int]] = []
        self.is_over = Event()
        self.exchanges = Exchanges(Membership(count=2, size=1), self.answered.append)
        self.broker = HostBroker(self.selector, self.exchanges)
        self.exchanges.attach(self.broker, range(2))
        self.exchanges.link(range(2))
        self.ends = [self.broker.open(rank) for rank in range(2)]

    def bring(self, *ranks: int) -> None:
        """Contribute to an exchange for these ranks."""
        for rank in ranks:
            fd = os.memfd_create("brought")
            os.write(fd, b"%d" % rank)
            message = json.dumps({"label": "a barrier", "alone": False, "resumes": True}).encode()
            socket.send_fds(self.ends[rank], [message], [fd])
            os.close(fd)

    def turn(self) -> None:
        for key, _ in self.selector.select(0.0):
            key.data()

    def answer_for(self, seconds: float) -> None:
        """Answer the ranks for this many seconds, or until `is_over` is set."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self.is_over.is_set():
            for key, _ in self.selector.select(0.01):
                key.data()

    def close(self) -> None:
        self.broker.close()
        self.selector.close()
        for end in self.ends:
            end.close()


@pytest.fixture
def exchanges() -> Iterator[Hub]:
    with closing(Hub()) as made:
        yield made


def link_of(end: socket.socket, timeout: float = 5.0) -> IslandLink:
    place = IslandPlace(island=0, count=2, size=1, fd=end.detach(), returns=False)
    return IslandLink(place, 0, timeout=timeout, warn_after=5.0)


def refuse(*given: Any) -> NoReturn:
    raise OSError(errno.ETOOMANYREFS, os.strerror(errno.ETOOMANYREFS))


def test_ranks_get_each_others_bytes(exchanges: Hub) -> None:
    exchanges.bring(0, 1)
    exchanges.turn()
    assert exchanges.answered == [(0, 1)]
    with closing(link_of(exchanges.ends[0])) as link:
        found = link._receive(5.0)
    assert found is not None
    assert (found[0]["islands"], found[1]) == ([0, 1], [b"1"])


def test_ended_rank_is_sent_nothing(exchanges: Hub) -> None:
    exchanges.bring(0, 1)
    exchanges.ends[1].close()
    exchanges.turn()
    assert exchanges.answered == [(0, 1)]


def test_launcher_runs_out_of_files(exchanges: Hub) -> None:
    exchanges.bring(0)
    words = "The file of rank 0 cannot be received: too many open files"
    with no_more_files(), pytest.raises(LaunchError, match=words):
        exchanges.turn()


def test_launcher_cannot_send_files(exchanges: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    exchanges.bring(0, 1)
    monkeypatch.setattr(socket, "send_fds", refuse)
    words = r"cannot be sent to rank 0 \(Too many references: .*\): too many"
    with pytest.raises(LaunchError, match=words):
        exchanges.turn()


def test_rank_runs_out_of_files(exchanges: Hub) -> None:
    exchanges.bring(0, 1)
    exchanges.turn()
    words = "Rank 0 cannot receive islands' files: too many open files"
    with (
        closing(link_of(exchanges.ends[0])) as link,
        no_more_files(),
        pytest.raises(CollectiveError, match=words),
    ):
        link._receive(5.0)


def test_rank_cannot_send_its_file(exchanges: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "send_fds", refuse)
    words = r"Rank 0 cannot reach the launcher \(Too many references: "
    with (
        closing(link_of(exchanges.ends[0])) as link,
        pytest.raises(CollectiveError, match=words),
    ):
        link.exchange("a barrier", b"")


def test_returning_island_has_more_time_to_load(
    exchanges: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others wait ten times as long for a returning island, and no longer."""
    monkeypatch.setattr(island_link, "LAST", 0.05)
    exchanges.exchanges.membership.fresh.add(1)
    answering = Thread(target=exchanges.answer_for, args=[20.0])
    answering.start()
    began = time.monotonic()
    words = r"Rank 0 has waited 1 s in a barrier for rank 1 of another island"
    with (
        closing(link_of(exchanges.ends[0], timeout=0.05)) as link,
        pytest.raises(CollectiveError, match=words),
    ):
        link.exchange("a barrier", b"")
    assert 1.0 <= time.monotonic() - began < 10.0  # while it is still answered
    exchanges.is_over.set()
    answering.join()


def test_rank_of_a_removed_island_raises(exchanges: Hub) -> None:
    exchanges.exchanges.lose(0)
    with (
        closing(link_of(exchanges.ends[0])) as link,
        pytest.raises(CollectiveError, match="The launcher has removed island 0"),
    ):
        link.exchange("a barrier", b"")


@pytest.mark.parametrize(("hard", "soft"), [(100, None), (4096, 640)])
def test_raises_limit_of_open_files(
    monkeypatch: pytest.MonkeyPatch, hard: int, soft: int | None
) -> None:
    """The limit is raised to the number that exchanges need, or the run is refused."""
    given: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda of: (64, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda of, limits: given.append(limits))
    if soft is None:
        words = "64 workers of 2 islands with --elastic-islands need 640 open files on their host"
        with pytest.raises(LaunchError, match=words):
            allow_files(64, 2)
    else:
        allow_files(64, 2)
        assert given == [(soft, hard)]


class Elsewhere:
    """A broker on another host with its files. It executes its messages later, in order."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.held: set[Key] = set()
        self.dropped: set[Key] = set()
        """Files that are not fetched any more."""
        self.orders: deque[Callable[[], None]] = deque()
        self.given: list[Delivery] = []

    def settle(self, deliveries: Sequence[Delivery], dropped: Sequence[Key]) -> None:
        self.orders.append(partial(self._settle, list(deliveries), list(dropped)))

    def _settle(self, deliveries: Sequence[Delivery], dropped: Sequence[Key]) -> None:
        for delivery in deliveries:
            assert self.held.issuperset(delivery.keys), "it gives what it does not have"
            self.given.append(delivery)
        self.held.difference_update(dropped)
        self.dropped.update(dropped)

    def shut(self, ranks: Sequence[int]) -> None:
        return


class Cluster:
    """Islands of two ranks on hosts that may be lost.

    Messages are delivered in a random order, but in order on each connection.
    """

    def __init__(self, draw: random.Random, hosts: Sequence[Sequence[int]], islands: int) -> None:
        self.draw = draw
        self.islands = islands
        self.exchanges = Exchanges(Membership(count=islands, size=2), lambda found: None)
        self.exchanges.transfers = self
        self.brokers = [Elsewhere(number) for number in range(len(hosts))]
        self.home = {rank: number for number, ranks in enumerate(hosts) for rank in ranks}
        for broker, ranks in zip(self.brokers, hosts, strict=True):
            self.exchanges.attach(broker, ranks)
        self.exchanges.link(self.home)
        self.fetches: list[tuple[Elsewhere, Key, Elsewhere]] = []
        self.lost: set[int] = set()
        self.numbers = count(1)
        self.living = set(range(islands))
        self.waiting: set[int] = set()
        self.learned: dict[int, list[list[int]]] = {rank: [] for rank in self.home}

    def bring(self, what: Contribution, data: str | None, source: Broker, target: Broker) -> bool:
        assert isinstance(source, Elsewhere)
        assert isinstance(target, Elsewhere)
        assert what.key in source.held
        if data is not None:
            target.orders.append(partial(target.held.add, what.key))
        else:
            self.fetches.append((target, what.key, source))
        return data is not None

    def come(self, rank: int) -> None:
        """Contribute to the next exchange of `rank`."""
        what = Contribution(
            rank=rank,
            number=next(self.numbers),
            size=1,
            label=f"number {len(self.learned[rank])}",
            alone=len(self.learned[rank]) % 3 == 1,
            resumes=False,
        )
        self.waiting.add(rank)
        self.brokers[self.home[rank]].held.add(what.key)
        self.exchanges.contribute(what, "" if self.draw.random() < 0.5 else None)

    def lose(self, islands: set[int]) -> None:
        """End the ranks of `islands`."""
        self.living -= islands
        for island in islands:
            self.exchanges.lose(island)
            self.waiting.difference_update(self.exchanges.membership.ranks(island))

    def lose_host(self, number: int) -> None:
        """Lose a host, with the islands that have ranks there."""
        self.lost.add(number)
        self.lose({rank // 2 for rank, home in self.home.items() if home == number} & self.living)
        self.exchanges.detach(self.brokers[number])

    def turn(self) -> None:
        """Deliver one of the messages in transit."""
        ready = [each for each in self.brokers if each.orders and each.number not in self.lost]
        if self.fetches and (not ready or self.draw.random() < 0.5):
            target, key, source = self.fetches.pop(self.draw.randrange(len(self.fetches)))
            gone = self.lost & {target.number, source.number}
            if not gone and key not in target.dropped and key in source.held:
                target.held.add(key)
                self.exchanges.mark_fetched(target, key)
        elif ready:
            broker = self.draw.choice(ready)
            broker.orders.popleft()()
            for delivery in broker.given:
                if delivery.rank // 2 in self.living:
                    self.learned[delivery.rank].append(delivery.words["islands"])
                    self.waiting.discard(delivery.rank)
            broker.given.clear()


HOSTS = (
    [[0, 1], [2, 3], [4, 5]],
    [[0, 1, 2, 3], [4, 5]],
    [[0], [1, 2, 3], [4, 5]],
    [[0, 2, 4], [1, 3, 5]],
)


@pytest.mark.parametrize("seed", range(60))
def test_all_ranks_agree_after_random_losses(seed: int) -> None:
    """No rank gets a missing file, all remaining ranks proceed, and no file is left anywhere."""
    draw = random.Random(seed)
    found = Cluster(draw, HOSTS[seed % len(HOSTS)], 3)
    while min(len(found.learned[2 * island]) for island in found.living) < 20:
        hosts = {found.home[rank] for rank in found.home} - found.lost
        chance = draw.random()
        if chance < 0.004 and len(found.living) > 1:
            found.lose({draw.choice(sorted(found.living))})
        elif chance < 0.008:
            number = draw.choice(sorted(hosts))
            if {rank // 2 for rank, home in found.home.items() if home != number} & {
                island
                for island in found.living
                if all(found.home[rank] != number for rank in (2 * island, 2 * island + 1))
            }:
                found.lose_host(number)
        free = [r for island in found.living for r in (2 * island, 2 * island + 1)]
        free = [rank for rank in free if rank not in found.waiting]
        if free and draw.random() < 0.5:
            found.come(draw.choice(free))
        else:
            found.turn()
    for rank, known in found.learned.items():
        for number, islands in enumerate(known):
            alike = [r for r in found.home if number % 3 != 1 or r % 2 == rank % 2]
            others = [found.learned[r][number] for r in alike if number < len(found.learned[r])]
            assert others == [islands] * len(others)
    found.lose(set(found.living))
    while found.fetches or any(d.orders for d in found.brokers if d.number not in found.lost):
        found.turn()
    left = [broker for broker in found.brokers if broker.number not in found.lost]
    assert all(broker.held == set() for broker in left)
    assert len(left) == len(found.brokers) - len(found.lost)
