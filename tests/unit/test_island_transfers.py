"""Transfers of files between hosts of elastic islands: served, fetched, cancelled, refused."""

import os
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager

import pytest

from shardwise.islands.elastic import transfers
from shardwise.islands.elastic.broker import Key
from shardwise.islands.elastic.transfers import NOTHING, Fetches
from shardwise.net import authentication, rpc

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")

SECRET = b"what only the processes of a run know"
DATA = os.urandom(3 * transfers.CHUNK + 5)


class Fetching:
    """Fetches, and their results."""

    def __init__(self, secret: bytes = SECRET) -> None:
        self.selector = selectors.DefaultSelector()
        self.came: dict[Key, bytes] = {}
        self.failed: list[tuple[Key, str]] = []
        self.fetches = Fetches(self.selector, secret, self._done, self._fail)

    def _done(self, key: Key, fd: int) -> None:
        with os.fdopen(fd, "rb") as file:
            file.seek(0)
            self.came[key] = file.read()

    def _fail(self, key: Key, why: str) -> None:
        self.failed.append((key, why))

    def until(self, is_done: Callable[[], bool]) -> None:
        """Handle events until a condition holds."""
        until = time.monotonic() + 20
        while not is_done():
            assert time.monotonic() < until
            for key, _ in self.selector.select(0.1):
                key.data()

    def close(self) -> None:
        self.fetches.close()
        self.selector.close()


def brought(data: bytes) -> int:
    fd = os.memfd_create("brought")
    os.write(fd, data)
    return fd


@contextmanager
def serving(held: dict[Key, bytes]) -> Iterator[tuple[str, int]]:
    """Serve `held`, and yield the address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        found = {key: brought(data) for key, data in held.items()}

        def copy(key: Key) -> int | None:
            return os.dup(found[key]) if key in found else None

        place = listener.getsockname()
        with closing(transfers.serve(listener, place, SECRET, copy)):
            yield place
        for fd in found.values():
            os.close(fd)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Check that no thread and no file is left."""
    files = os.listdir("/proc/self/fd")
    yield
    assert [each.name for each in threading.enumerate() if "islands" in each.name] == []
    assert len(os.listdir("/proc/self/fd")) == len(files)


def test_fetches_files() -> None:
    held = {(0, 1): DATA, (1, 7): b"little", (2, 3): b""}
    with serving(held) as place, closing(Fetching()) as found:
        for key in [*held, (0, NOTHING)]:
            found.fetches.begin(key, place)
        found.until(lambda: len(found.came) == 4)
    assert found.came == {**held, (0, NOTHING): b""}
    assert found.failed == []


def test_missing_file_is_requested_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "AGAIN", 0.01)
    with serving({}) as place, closing(Fetching()) as found:
        found.fetches.begin((0, 1), place)
        found.until(lambda: len(found.failed) > 1)
        found.fetches.cancel((0, 1))
    assert found.failed[0] == ((0, 1), "(0, 1) is not on this host")
    assert found.came == {}


def test_refuses_another_secret() -> None:
    with serving({(0, 1): DATA}) as place, closing(Fetching(b"another")) as found:
        found.fetches.begin((0, 1), place)
        found.until(lambda: bool(found.failed))
    assert "another secret" in found.failed[0][1]


def test_refuses_bytes_changed_in_transit() -> None:
    def relay(victim: socket.socket, place: tuple[str, int]) -> None:
        """Pass on all bytes, but change one byte of the data."""
        head = authentication.MAC + 4
        with victim, socket.create_connection(place) as server:
            for source, target, count in (
                (server, victim, authentication.NONCE),
                (victim, server, authentication.CLAIM),
                (server, victim, authentication.MAC),
                (victim, server, head + transfers._REQUEST.size),
                (server, victim, head + transfers._SIZE.size),
            ):
                target.sendall(source.recv(count, socket.MSG_WAITALL))
            data = bytearray(server.recv(len(DATA), socket.MSG_WAITALL))
            data[77] ^= 1
            victim.sendall(data + server.recv(authentication.MAC, socket.MSG_WAITALL))

    with (
        serving({(0, 1): DATA}) as place,
        socket.create_server(("127.0.0.1", 0)) as listener,
        closing(Fetching()) as found,
        ThreadPoolExecutor(1) as pool,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(transfers, "_role", lambda _: f"islands {place[0]} {place[1]}".encode())
        found.fetches.begin((0, 1), listener.getsockname())
        victim, _ = listener.accept()
        pool.submit(relay, victim, place).result(10)
        found.until(lambda: bool(found.failed))
        found.fetches.cancel((0, 1))
        assert found.failed[0] == ((0, 1), "the file was changed in transit")


def test_refuses_another_host_than_intended() -> None:
    with (
        serving({(0, 1): DATA}) as place,
        closing(Fetching()) as found,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(transfers, "_role", lambda _: b"islands 10.0.0.1 9")
        found.fetches.begin((0, 1), place)
        found.until(lambda: bool(found.failed))
    assert "another secret" in found.failed[0][1]


def test_fetch_fails_when_no_server_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        place = listener.getsockname()
    with closing(Fetching()) as found:
        found.fetches.begin((0, 1), place)
        found.until(lambda: bool(found.failed))
    assert found.failed[0] == ((0, 1), "Connection refused")


def test_stalled_server_does_not_block_close() -> None:
    """The server sends nothing, and the fetch can still be cancelled."""
    with socket.create_server(("127.0.0.1", 0)) as listener, closing(Fetching()) as found:
        found.fetches.begin((0, 1), listener.getsockname())
        peer, _ = listener.accept()
        began = time.monotonic()
        found.fetches.cancel((0, 1))
        found.fetches.close()
        assert time.monotonic() - began < 2
        peer.close()
        found.fetches = Fetches(found.selector, SECRET, found._done, found._fail)


def test_stalled_client_does_not_block_close() -> None:
    """A client that sends nothing does not block the end of the server."""
    with serving({(0, 1): DATA}) as place, socket.create_connection(place) as peer:
        role = transfers._role(place)
        proven = rpc.prove(peer, SECRET, role, time.monotonic() + 5)
        proven.send(transfers._REQUEST.pack(0, 1))
        assert peer.recv(1)
        began = time.monotonic()
    assert time.monotonic() - began < 2


def test_unreachable_host_does_not_block_close() -> None:
    """Its queue is full, so a connection is neither accepted nor refused."""
    with socket.socket() as listener, ExitStack() as stack:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        with closing(Fetching()) as found:
            found.fetches.begin((0, 1), listener.getsockname())
            time.sleep(0.1)
            began = time.monotonic()
        assert time.monotonic() - began < 2
    assert found.failed == []


@pytest.mark.parametrize("seed", range(5))
def test_cancels_fetches_at_any_time(seed: int) -> None:
    """Fetched files are complete, and nothing is left of the others."""
    held = {(rank, 1): DATA[: 1 + rank * 100_000] for rank in range(12)}
    with serving(held) as place, closing(Fetching()) as found:
        for key in held:
            found.fetches.begin(key, place)
        time.sleep(0.003 * seed)
        for rank in range(0, 12, 2):
            found.fetches.cancel((rank, 1))
        found.until(lambda: {rank for rank, _ in found.came} >= set(range(1, 12, 2)))
    assert all(held[key] == data for key, data in found.came.items())
