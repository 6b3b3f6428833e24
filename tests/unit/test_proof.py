"""Who is let in: proofs over connections, what is sealed, and the table behind them."""

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
from shardwise.net import authentication, environment
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
    def test_both_know_the_secret(self, listener: socket.socket) -> None:
        with (
            ThreadPoolExecutor(1) as pool,
            authentication.Acceptor(listener, KNOWN, ROLE) as acceptor,
            socket.create_connection(listener.getsockname()) as mine,
        ):
            accepted = pool.submit(acceptor.accept, soon())
            ours = authentication.prove(mine, KNOWN, ROLE, soon())
            ours.send(b"hello")
            ours.send(b"")
            found = accepted.result()
            assert found is not None
            with found as theirs:
                assert [theirs.receive(), theirs.receive()] == [b"hello", b""]
                theirs.send(b"x" * 200_000)
                assert ours.receive() == b"x" * 200_000
            assert ours.receive() is None

    def test_who_knows_another_is_cut_off_unread(self, listener: socket.socket) -> None:
        with (
            ThreadPoolExecutor(1) as pool,
            authentication.Acceptor(listener, KNOWN, ROLE) as acceptor,
            socket.create_connection(listener.getsockname()) as stranger,
        ):
            accepted = pool.submit(acceptor.accept, soon(1.0))
            with pytest.raises(authentication.Unproven):
                authentication.prove(stranger, b"guessed", ROLE, soon())
            assert accepted.result() is None

    def test_who_listens_must_know_it_too(self, listener: socket.socket) -> None:
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
            with pytest.raises(authentication.Unproven, match="does not know the secret"):
                authentication.prove(mine, KNOWN, ROLE, soon())
            pretended.result()

    def test_what_was_heard_once_proves_nothing_later(self, listener: socket.socket) -> None:
        with (
            ThreadPoolExecutor(1) as pool,
            authentication.Acceptor(listener, KNOWN, ROLE) as acceptor,
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

    def test_silent_strangers_keep_nobody_waiting(self, listener: socket.socket) -> None:
        with ExitStack() as stack:
            acceptor = stack.enter_context(authentication.Acceptor(listener, KNOWN, ROLE))
            place = listener.getsockname()
            for _ in range(2 * authentication.MOST):
                stack.enter_context(socket.create_connection(place))
            pool = stack.enter_context(ThreadPoolExecutor(1))
            accepted = pool.submit(acceptor.accept, soon())
            began = time.monotonic()
            mine = stack.enter_context(socket.create_connection(place))
            authentication.prove(mine, KNOWN, ROLE, soon())
            found = accepted.result()
            assert found is not None
            found.close()
            assert time.monotonic() - began < authentication.PATIENCE

    def test_a_bell_ends_the_waiting(self, listener: socket.socket) -> None:
        ours, theirs = socket.socketpair()
        with theirs, authentication.Acceptor(listener, KNOWN, ROLE, theirs) as acceptor:
            ours.close()
            assert acceptor.accept() is None

    def test_who_says_nothing_is_given_up(self, listener: socket.socket) -> None:
        with (
            socket.create_connection(listener.getsockname()) as mine,
            pytest.raises(TimeoutError),
        ):
            authentication.prove(mine, KNOWN, ROLE, soon(0.1))


class TestRelay:
    """Someone in between who does not know the secret, and passes on what others say."""

    def test_a_proof_for_one_process_proves_nothing_to_another(
        self, listener: socket.socket
    ) -> None:
        with (
            ThreadPoolExecutor(1) as pool,
            authentication.Acceptor(listener, KNOWN, b"status 2") as acceptor,
            socket.create_connection(listener.getsockname()) as relayed,
        ):
            accepted = pool.submit(acceptor.accept, soon(1.0))
            with pytest.raises(authentication.Unproven):
                authentication.prove(relayed, KNOWN, b"status 1", soon())
            assert accepted.result() is None

    def ends(self) -> tuple[authentication.Seals, authentication.Seals]:
        """The seals of the two ends of a connection."""
        return authentication.Seals(b"one", b"other"), authentication.Seals(b"other", b"one")

    def test_a_message_that_is_added_is_forged(self) -> None:
        one, other = self.ends()
        stranger = authentication.Seals(b"guessed", b"other")
        other.take(one.frame(b"first") + stranger.frame(b"second"))
        assert other.next() == b"first"
        with pytest.raises(authentication.Forged):
            other.next()

    @pytest.mark.parametrize("order", [[0, 0], [1], [0, 2]])
    def test_messages_that_are_repeated_or_left_out_are_forged(self, order: list[int]) -> None:
        one, other = self.ends()
        frames = [one.frame(f"{number}".encode()) for number in range(3)]
        *before, last = order
        for number in before:
            other.take(frames[number])
            assert other.next() == f"{number}".encode()
        other.take(frames[last])
        with pytest.raises(authentication.Forged):
            other.next()

    def test_a_message_that_is_sent_back_is_forged(self) -> None:
        one, _ = self.ends()
        one.take(one.frame(b"mine"))
        with pytest.raises(authentication.Forged):
            one.next()

    def test_a_length_that_no_message_has_is_not_waited_for(self) -> None:
        one, _ = self.ends()
        one.take(b"\xff" * 100)
        with pytest.raises(authentication.Forged, match="is longer than any"):
            one.next()


class TestSeals:
    def test_what_is_sealed_comes_back(self) -> None:
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
    def test_all_else_is_forged(self, data: bytes) -> None:
        with pytest.raises(authentication.Forged):
            authentication.unsealed(KNOWN, "p", data)


class TestSecret:
    def test_the_launchers_own_comes_first(self) -> None:
        assert environment.given_secret({}) is None
        assert environment.given_secret({environment.SECRET_VARIABLE: "s" * 16}) == "s" * 16
        assert (
            environment.given_secret(
                {environment.SECRET_VARIABLE: "s" * 16, environment.RUN_SECRET_VARIABLE: "ours"}
            )
            == "ours"
        )

    def test_a_short_one_is_refused(self) -> None:
        with pytest.raises(LaunchError, match=r"has 5 characters.*openssl rand -hex 32"):
            environment.given_secret({environment.SECRET_VARIABLE: "short"})


class TestTable:
    @pytest.fixture
    def stores(self, listener: socket.socket) -> Iterator[tuple[HostStore, ClientStore]]:
        place = listener.getsockname()
        hosted = HostStore(socket.socket(fileno=listener.detach()), KNOWN, 5.0)
        connection = socket.create_connection(place)
        proven = authentication.prove(connection, KNOWN, role_of(place[1]), soon())
        reaching = ClientStore(proven, 5.0)
        yield hosted, reaching
        reaching.close()
        hosted.close()
        wait_until(
            lambda: "shardwise-store" not in {thread.name for thread in threading.enumerate()}
        )

    def test_torchs_verbs(self, stores: tuple[HostStore, ClientStore]) -> None:
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

    def test_one_waits_for_what_the_other_sets(self, stores: tuple[HostStore, ClientStore]) -> None:
        hosted, reaching = stores
        for first, second in ((hosted, reaching), (reaching, hosted)):
            with ThreadPoolExecutor(1) as pool:
                waited = pool.submit(first.get, f"{first}")
                time.sleep(0.05)
                second.set(f"{first}", "here")
                assert waited.result() == b"here"

    def test_a_wait_ends(self, stores: tuple[HostStore, ClientStore]) -> None:
        for store in stores:
            store.set("here", "")
            with pytest.raises(dist.DistStoreError, match=r"after 0\.1 s, for gone"):
                store.wait(["here", "gone"], timedelta(seconds=0.1))

    def test_a_late_answer_is_not_taken_for_the_next(
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

    def test_rank_0_goes(self, stores: tuple[HostStore, ClientStore]) -> None:
        hosted, reaching = stores
        hosted.close()
        with pytest.raises(dist.DistStoreError, match="rank 0 is gone"):
            reaching.get("key")

    def test_nobody_comes_late(self, listener: socket.socket) -> None:
        place = listener.getsockname()
        hosted = HostStore(socket.socket(fileno=listener.detach()), KNOWN, 5.0)
        hosted.accept_no_more()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(place)
        hosted.close()

    def test_nothing_is_done_for_a_stranger(self, listener: socket.socket) -> None:
        place = listener.getsockname()
        hosted = HostStore(socket.socket(fileno=listener.detach()), KNOWN, 5.0)
        with socket.create_connection(place) as stranger:
            stranger.settimeout(5)
            stranger.recv(authentication.NONCE)
            stranger.sendall(b"\0" * authentication.CLAIM + b'["set", "key", {"bytes": "mine"}]\n')
            with suppress(ConnectionResetError):  # it hung up on what it has not read
                assert stranger.recv(1) == b""
        assert not hosted.check(["key"])
        hosted.close()

    def test_absent_ones_are_told(self) -> None:
        table = KeyValueTable()
        table.set("b", b"")
        assert table.absent(["a", "b", "c"]) == ["a", "c"]
        assert table.absent(["b"]) == []
