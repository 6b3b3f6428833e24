"""The launcher's ends of the links between islands, and a rank's, where the system refuses."""

import errno
import json
import os
import resource
import selectors
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any, NoReturn

import pytest

from shardwise.collectives.island_link import IslandLink
from shardwise.errors import CollectiveError, LaunchError
from shardwise.launch.island_desk import IslandDesk
from shardwise.launch.island_hub import IslandHub
from shardwise.launch.island_membership import Membership
from shardwise.launch.island_place import IslandPlace
from shardwise.launch.island_workers import allow_files

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")


@contextmanager
def no_more_files() -> Iterator[None]:
    """Inside the block this process may open no file more."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


class Hub:
    """A hub of two islands of a rank each, and the ranks' ends."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self.answered: list[Sequence[int]] = []
        self.hub = IslandHub(Membership(count=2, size=1), self.answered.append)
        self.desk = IslandDesk(self.selector, self.hub)
        self.hub.attach(self.desk, range(2))
        self.hub.link(range(2))
        self.ends = [self.desk.open(rank) for rank in range(2)]

    def bring(self, *ranks: int) -> None:
        """These ranks come to an exchange."""
        for rank in ranks:
            fd = os.memfd_create("brought")
            os.write(fd, b"%d" % rank)
            message = json.dumps({"come": "a barrier", "alone": False, "resumes": True}).encode()
            socket.send_fds(self.ends[rank], [message], [fd])
            os.close(fd)

    def turn(self) -> None:
        for key, _ in self.selector.select(0.0):
            key.data()

    def close(self) -> None:
        self.desk.close()
        self.selector.close()
        for end in self.ends:
            end.close()


@pytest.fixture
def hub() -> Iterator[Hub]:
    with closing(Hub()) as made:
        yield made


def link_of(end: socket.socket) -> IslandLink:
    place = IslandPlace(island=0, count=2, size=1, fd=end.detach(), returns=False)
    return IslandLink(place, 0, timeout=5.0, warn_after=5.0)


def refuse(*given: Any) -> NoReturn:
    raise OSError(errno.ETOOMANYREFS, os.strerror(errno.ETOOMANYREFS))


def test_each_gets_what_the_other_has_brought(hub: Hub) -> None:
    hub.bring(0, 1)
    hub.turn()
    assert hub.answered == [(0, 1)]
    with closing(link_of(hub.ends[0])) as link:
        found = link._received(5.0)
    assert found is not None
    assert (found[0]["islands"], found[1]) == ([0, 1], [b"1"])


def test_a_rank_that_has_just_ended_is_sent_nothing(hub: Hub) -> None:
    hub.bring(0, 1)
    hub.ends[1].close()
    hub.turn()
    assert hub.answered == [(0, 1)]


def test_the_launcher_has_no_file_left(hub: Hub) -> None:
    hub.bring(0)
    words = "What rank 0 brings cannot be opened: there are too many open files"
    with no_more_files(), pytest.raises(LaunchError, match=words):
        hub.turn()


def test_the_launcher_cannot_pass_on(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.bring(0, 1)
    monkeypatch.setattr(socket, "send_fds", refuse)
    words = r"cannot be passed on to rank 0 \(Too many references: .*\): there are too many"
    with pytest.raises(LaunchError, match=words):
        hub.turn()


def test_a_rank_has_no_file_left(hub: Hub) -> None:
    hub.bring(0, 1)
    hub.turn()
    words = "Rank 0 cannot open what islands bring: there are too many open files"
    with (
        closing(link_of(hub.ends[0])) as link,
        no_more_files(),
        pytest.raises(CollectiveError, match=words),
    ):
        link._received(5.0)


def test_a_rank_cannot_bring(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "send_fds", refuse)
    words = r"Rank 0 cannot reach the launcher \(Too many references: "
    with (
        closing(link_of(hub.ends[0])) as link,
        pytest.raises(CollectiveError, match=words),
    ):
        link.exchange("a barrier", b"")


def test_a_rank_that_is_left_out(hub: Hub) -> None:
    hub.hub.lose(0)
    with (
        closing(link_of(hub.ends[0])) as link,
        pytest.raises(CollectiveError, match="Island 0 is left out by the launcher"),
    ):
        link.exchange("a barrier", b"")


@pytest.mark.parametrize(("hard", "soft"), [(100, None), (4096, 640)])
def test_open_files_of_a_run(monkeypatch: pytest.MonkeyPatch, hard: int, soft: int | None) -> None:
    """They are as many as an exchange takes, or the run is refused."""
    given: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda of: (64, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda of, limits: given.append(limits))
    if soft is None:
        words = "64 workers of 2 islands with --elastic-islands take 640 open files on their host"
        with pytest.raises(LaunchError, match=words):
            allow_files(64, 2)
    else:
        allow_files(64, 2)
        assert given == [(soft, hard)]
