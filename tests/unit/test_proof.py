"""Authentication of connections, sealed messages, and the key-value store behind them."""

import os
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from shardwise.errors import LaunchError
from shardwise.net import authentication, environment, rpc
from shardwise.net.store import ClientStore, HostStore, KeyValueTable, role_of
from tests.disk import wait_until

KNOWN = b"what all ranks of this run know"
ROLE = b"a role of this test"


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as found:
        yield found


def soon(seconds: float = 10.0) -> float:
    return time.monotonic() + seconds


class TestProof:
    def test_both_ends_authenticate(self, listener: socket.socket) -> None:
        with (
            ThreadPoolExecutor(1) as pool,
            rpc.Acceptor(listener, KNOWN, ROLE) as acceptor,
            socket.create_connection(listener.getsockname()) as mine,
        ):
            accepted = pool.submit(acceptor.accept, soon())
            ours = rpc.prove(mine, KNOWN, ROLE, soon())
            ours.send(b"hello")
            ours.send(b"")
            found = accepted.result()
            assert found is not None
            with found as theirs:
                assert [theirs.receive(), theirs.receive()] == [b"hello", b""]
                theirs.send(b"x" * 200_000)
                assert ours.receive() == b"x" * 200_000
            assert ours.receive() is None

    def test_peer_with_other_secret_is_disconnected_unread(self, listener: socket.socket) -> None:
        with (
            ThreadPoolExecutor(1) as pool,
            rpc.Acceptor(listener, KNOWN, ROLE) as acceptor,
            socket.create_connection(listener.getsockname()) as stranger,
        ):
            accepted = pool.submit(acceptor.accept, soon(1.0))
            with pytest.raises(rpc.Unproven):
                rpc.prove(stranger, b"guessed", ROLE, soon())
            assert accepted.result() is None

    def test_server_must_know_secret(self, listener: socket.socket) -> None:
        def pretend() -> None:
            accepted, _ = listener.accept()
            with accepted:
                accepted.sendall(os.urandom(authentication.NONCE))
                accepted.recv(authentication.CLAIM)
                accepted.sendall(os.urandom(authentication.MAC))

        with (
            ThreadPoolExecutor(1) as pool,
            socket.create_connection(listener.getsockname()) as mine,
        ):
            pretended = pool.submit(pretend)
            with pytest.raises(rpc.Unproven, match="does not know the secret"):
                rpc.prove(mine, KNOWN, ROLE, soon())
            pretended.result()

    def test_replayed_proof_is_invalid(self, listener: socket.socket) -> None:
        with (
            ThreadPoolExecutor(1) as pool,
            rpc.Acceptor(listener, KNOWN, ROLE) as acceptor,
        ):
            with socket.create_connection(listener.getsockname()) as mine:
                accepted = pool.submit(acceptor.accept, soon())
                claim = authentication.Proof(KNOWN, ROLE, mine.recv(authentication.NONCE))
                mine.sendall(claim.words)
                found = accepted.result()
                assert found is not None
                found.close()
            with socket.create_connection(listener.getsockname()) as stranger:
                again = pool.submit(acceptor.accept, soon(1.0))
                stranger.recv(authentication.NONCE)
                stranger.sendall(claim.words)
                assert stranger.recv(1) == b""
                assert again.result() is None

    def test_silent_strangers_do_not_block(self, listener: socket.socket) -> None:
        with ExitStack() as stack:
            acceptor = stack.enter_context(rpc.Acceptor(listener, KNOWN, ROLE))
            place = listener.getsockname()
            for _ in range(2 * rpc.MOST):
                stack.enter_context(socket.create_connection(place))
            pool = stack.enter_context(ThreadPoolExecutor(1))
            accepted = pool.submit(acceptor.accept, soon())
            began = time.monotonic()
            mine = stack.enter_context(socket.create_connection(place))
            rpc.prove(mine, KNOWN, ROLE, soon())
            found = accepted.result()
            assert found is not None
            found.close()
            assert time.monotonic() - began < rpc.PATIENCE

    def test_bell_ends_accept(self, listener: socket.socket) -> None:
        ours, theirs = socket.socketpair()
        with theirs, rpc.Acceptor(listener, KNOWN, ROLE, theirs) as acceptor:
            ours.close()
            assert acceptor.accept() is None

    def test_silent_server_is_given_up(self, listener: socket.socket) -> None:
        with (
            socket.create_connection(listener.getsockname()) as mine,
            pytest.raises(TimeoutError),
        ):
            rpc.prove(mine, KNOWN, ROLE, soon(0.1))


class TestRelay:
    """An attacker in between, who does not know the secret and relays messages."""

    def test_relayed_proof_is_invalid(self, listener: socket.socket) -> None:
        with (
            ThreadPoolExecutor(1) as pool,
            rpc.Acceptor(listener, KNOWN, b"status 2") as acceptor,
            socket.create_connection(listener.getsockname()) as relayed,
        ):
            accepted = pool.submit(acceptor.accept, soon(1.0))
            with pytest.raises(rpc.Unproven):
                rpc.prove(relayed, KNOWN, b"status 1", soon())
            assert accepted.result() is None

    def ends(self) -> tuple[authentication.Seals, authentication.Seals]:
        """Return the seals of the two ends of a connection."""
        return authentication.Seals(b"one", b"other"), authentication.Seals(b"other", b"one")

    def test_added_message_is_forged(self) -> None:
        one, other = self.ends()
        stranger = authentication.Seals(b"guessed", b"other")
        other.take(one.frame(b"first") + stranger.frame(b"second"))
        assert other.next() == b"first"
        with pytest.raises(authentication.Forged):
            other.next()

    @pytest.mark.parametrize("order", [[0, 0], [1], [0, 2]])
    def test_repeated_or_omitted_messages_are_forged(self, order: list[int]) -> None:
        one, other = self.ends()
        frames = [one.frame(f"{number}".encode()) for number in range(3)]
        *before, last = order
        for number in before:
            other.take(frames[number])
            assert other.next() == f"{number}".encode()
        other.take(frames[last])
        with pytest.raises(authentication.Forged):
            other.next()

    def test_reflected_message_is_forged(self) -> None:
        one, _ = self.ends()
        one.take(one.frame(b"mine"))
        with pytest.raises(authentication.Forged):
            one.next()

    def test_impossible_length_is_forged(self) -> None:
        one, _ = self.ends()
        one.take(b"\xff" * 100)
        with pytest.raises(authentication.Forged, match="is longer than any"):
            one.next()


class TestSeals:
    def test_unsealed_returns_data(self) -> None:
        assert (
            authentication.unsealed(KNOWN, "p", authentication.sealed(KNOWN, "p", b"data"))
            == b"data"
        )

    @pytest.mark.parametrize(
        "data",
        [
            b"",
            b"data",
            authentication.sealed(b"guessed", "p", b"data"),
            authentication.sealed(KNOWN, "another purpose", b"data"),
            authentication.sealed(KNOWN, "p", b"data") + b"more",
        ],
    )
    def test_altered_data_is_forged(self, data: bytes) -> None:
        with pytest.raises(authentication.Forged):
            authentication.unsealed(KNOWN, "p", data)


class TestSecret:
    def test_secret_of_launcher_wins(self) -> None:
        assert environment.given_secret({}) is None
        assert environment.given_secret({environment.SECRET_VARIABLE: "s" * 16}) == "s" * 16
        assert (
            environment.given_secret(
                {environment.SECRET_VARIABLE: "s" * 16, environment.RUN_SECRET_VARIABLE: "ours"}
            )
            == "ours"
        )

    def test_refuses_short_secret(self) -> None:
        with pytest.raises(LaunchError, match=r"has 5 characters.*openssl rand -hex 32"):
            environment.given_secret({environment.SECRET_VARIABLE: "short"})


class TestTable:
    @pytest.fixture
    def stores(self, listener: socket.socket) -> Iterator[tuple[HostStore, ClientStore]]:
        place = listener.getsockname()
        hosted = HostStore(socket.socket(fileno=listener.detach()), KNOWN, 5.0)
        connection = socket.create_connection(place)
        proven = rpc.prove(connection, KNOWN, role_of(place[1]), soon())
        reaching = ClientStore(proven, 5.0)
        yield hosted, reaching
        reaching.close()
        hosted.close()
        wait_until(
            lambda: "shardwise-store" not in {thread.name for thread in threading.enumerate()}
        )

    def test_store_has_methods_of_torch(self, stores: tuple[HostStore, ClientStore]) -> None:
        hosted, reaching = stores
        reaching.set("bytes", bytes(range(256)))
        assert hosted.get("bytes") == bytes(range(256))
        assert [reaching.add("number", 2), hosted.add("number", 3)] == [2, 5]
        assert reaching.get("number") == b"5"
        assert reaching.compare_set("word", "", "one") == b"one"
        assert reaching.compare_set("word", "other", "two") == b"one"
        assert hosted.compare_set("word", "one", "two") == b"two"
        assert hosted.compare_set("none", "expected", "two") == b"expected"
        assert (reaching.num_keys(), reaching.check(["word"]), reaching.check(["none"])) == (
            3,
            True,
            False,
        )
        assert (reaching.delete_key("word"), reaching.delete_key("word")) == (True, False)

    def test_wait_ends_when_key_is_set(self, stores: tuple[HostStore, ClientStore]) -> None:
        hosted, reaching = stores
        for first, second in ((hosted, reaching), (reaching, hosted)):
            with ThreadPoolExecutor(1) as pool:
                waited = pool.submit(first.get, f"{first}")
                time.sleep(0.05)
                second.set(f"{first}", "here")
                assert waited.result() == b"here"

    def test_wait_times_out(self, stores: tuple[HostStore, ClientStore]) -> None:
        for store in stores:
            store.set("here", "")
            with pytest.raises(dist.DistStoreError, match=r"after 0\.1 s, for gone"):
                store.wait(["here", "gone"], timedelta(seconds=0.1))

    def test_late_reply_is_not_taken_for_next(
        self, stores: tuple[HostStore, ClientStore], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        hosted, reaching = stores
        hosted.set("here", "")
        answer = HostStore._answer
        busy = threading.Event()

        def late(*given: Any) -> Any:
            busy.wait(5)
            return answer(*given)

        monkeypatch.setattr(HostStore, "_answer", late)
        monkeypatch.setattr("shardwise.net.store.DRAWN_OUT", 0.05)
        with pytest.raises(dist.DistStoreError, match="rank 0 has not answered"):
            reaching.check(["nowhere"])
        busy.set()
        with pytest.raises(dist.DistStoreError, match="rank 0 has not answered"):
            reaching.check(["here"])

    def test_client_reports_end_of_rank_0(self, stores: tuple[HostStore, ClientStore]) -> None:
        hosted, reaching = stores
        hosted.close()
        with pytest.raises(dist.DistStoreError, match="rank 0 is gone"):
            reaching.get("key")

    @pytest.mark.parametrize("early", [False, True])
    def test_waits_fail_after_a_rank_has_disconnected(
        self, listener: socket.socket, early: bool
    ) -> None:
        """With `--survive`, two ranks may connect to each other while a third one is lost."""
        place = listener.getsockname()
        hosted = HostStore(socket.socket(fileno=listener.detach()), KNOWN, 60.0, survives=True)
        left, lost = (
            ClientStore(
                rpc.prove(socket.create_connection(place), KNOWN, role_of(place[1]), soon()), 60.0
            )
            for _ in range(2)
        )
        left.set("here", "")
        if early:  # rank 0 still waits for others, and reports which ones are missing
            lost.close()
            assert hosted.absent(["another rank"], 0.5) == ["another rank"]
        hosted.accept_no_more()
        lost.close()
        with pytest.raises(dist.DistStoreError, match="a rank is gone"):
            hosted.get("address of the lost rank")
        with pytest.raises(dist.DistStoreError, match="rank 0 is gone"):
            left.get("address of the lost rank")
        assert hosted.get("here") == b""
        hosted.close()
        left.close()

    def test_accept_no_more_refuses_connections(self, listener: socket.socket) -> None:
        place = listener.getsockname()
        hosted = HostStore(socket.socket(fileno=listener.detach()), KNOWN, 5.0)
        hosted.accept_no_more()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(place)
        hosted.close()

    def test_stranger_cannot_set_keys(self, listener: socket.socket) -> None:
        place = listener.getsockname()
        hosted = HostStore(socket.socket(fileno=listener.detach()), KNOWN, 5.0)
        with socket.create_connection(place) as stranger:
            stranger.settimeout(5)
            stranger.recv(authentication.NONCE)
            stranger.sendall(b"\0" * authentication.CLAIM + b'["set", "key", {"bytes": "mine"}]\n')
            with suppress(ConnectionResetError):  # the server closed with unread data
                assert stranger.recv(1) == b""
        assert not hosted.check(["key"])
        hosted.close()

    def test_absent_lists_missing_keys(self) -> None:
        table = KeyValueTable()
        table.set("b", b"")
        assert table.absent(["a", "b", "c"]) == ["a", "c"]
        assert table.absent(["b"]) == []
