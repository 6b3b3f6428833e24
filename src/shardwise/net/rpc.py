"""Exchanges authenticated messages over TCP between the processes of a run.

    accepts   ─▶ a nonce
    connects  ─▶ a nonce and its proof          (authentication.py)
    accepts   ─▶ its own proof
    both      ─▶ messages: length, MAC, content

    Server      accepts and handles connections in a thread
    connect     opens a Connection, whose `call` sends a request and waits for the reply
    call_all    sends one request to many servers at once
    Link        one end of a connection in an event loop; its calls do not block

A peer without the secret is disconnected before anything but its proof is read. A silent peer does
not delay other peers.

Four protocols do not use this module. An ssh agent sends its messages over ssh's standard streams,
because ssh has already authenticated both ends. These streams also carry lines that are printed
during login (launch/ssh/protocol.py). The other three protocols use Unix sockets, because they pass
file descriptors or are on the hot path: comm/socket_mesh.py, the links between rank and launcher,
and the fork server of tools/verify.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Generator, Hashable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar
from weakref import WeakSet

from shardwise.net.authentication import CLAIM, MAC, NONCE, Forged, Proof, Seals

K = TypeVar("K", bound=Hashable)

PATIENCE = 5.0
"""Seconds within which a new peer must authenticate."""

MOST = 128
"""Maximum number of peers that may be authenticating at the same time."""

RETRY = 0.05
"""Seconds to wait before accepting again if the process is out of file descriptors."""

CHUNK = 1 << 16

HUNG_UP = "the server hung up: it has another secret, or belongs to another run"

_opened: WeakSet[socket.socket] = WeakSet()


class Unproven(OSError):
    """Raised if the other end of a connection has not proved that it knows the run's secret."""


# -- one connection ---------------------------------------------------------------------------


class Connection:
    """An authenticated connection with blocking calls. It can be used as a context manager."""

    def __init__(self, peer: socket.socket, seals: Seals) -> None:
        self.socket = peer
        self.seals = seals
        _opened.add(peer)
        with suppress(OSError):  # the peer is gone: the next read or write will report it
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, message: bytes) -> None:
        self.socket.sendall(self.seals.frame(message))

    def receive(self) -> bytes | None:
        """Return the next message, or None at the end of the stream.

        Raises Forged if the message is not authentic.
        """
        # Never read past the message: other code reads any bulk data that follows it.
        while (message := self.seals.next()) is None:
            data = self.socket.recv(min(self.seals.missing, CHUNK))
            if not data:
                return None
            self.seals.take(data)
        return message

    def call(self, request: Any, seconds: float) -> Any:
        """Send a request and return the reply.

        Replies are not numbered. Close the connection after an error, because a late reply would be
        mistaken for the reply to the next request.

        Args:
            request: The request: JSON values, which may contain bytes.
            seconds: Maximum time in seconds to wait without receiving data.

        Raises:
            OSError: No reply arrived.
            Forged: The reply is not authentic.
        """
        self.socket.settimeout(seconds)
        self.send(encode(request))
        reply = self.receive()
        if reply is None:
            raise ConnectionError("the connection ended")
        return decode(reply)

    def close(self) -> None:
        self.socket.close()


def encode(message: Any) -> bytes:
    """Encode a message, which may contain bytes, as JSON."""
    return json.dumps(message, separators=(",", ":"), default=_replace_bytes).encode()


def decode(data: bytes) -> Any:
    """Decode a message from `encode`. Raise ValueError if it is not valid JSON."""
    return json.loads(data, object_hook=_restore_bytes)


def _replace_bytes(value: object) -> dict[str, str]:
    if not isinstance(value, bytes):
        raise TypeError(f"{type(value).__name__} cannot be sent as JSON")
    return {"bytes": value.decode("latin-1")}


def _restore_bytes(found: dict[str, Any]) -> Any:
    is_bytes = found.keys() == {"bytes"} and isinstance(found["bytes"], str)
    return found["bytes"].encode("latin-1") if is_bytes else found


def connect(
    place: tuple[str, int], secret: bytes, role: bytes, until: float, *, reach: float | None = None
) -> Connection:
    """Connect to a server and authenticate.

    Args:
        place: The server's host and port.
        secret: The run's secret.
        role: The role that the server must have (see authentication.py).
        until: The deadline (monotonic clock, in seconds).
        reach: Time limit in seconds for establishing the TCP connection, excluding authentication.
            If None, only `until` applies.

    Raises:
        Unproven: The server has a different secret or role, or closes the connection.
        OSError: The server cannot be reached.
    """
    left = max(0.001, until - time.monotonic())
    peer = socket.create_connection(place, timeout=left if reach is None else min(reach, left))
    try:
        return prove(peer, secret, role, until)
    except BaseException:
        peer.close()
        raise


def prove(peer: socket.socket, secret: bytes, role: bytes, until: float) -> Connection:
    """Authenticate to the server at the other end of `peer`, and check the server's proof.

    Raises the same errors as `connect`.
    """
    try:
        proof = Proof(secret, role, _exactly(peer, NONCE, until))
        peer.sendall(proof.words)
        answer = _exactly(peer, MAC, until)
    except ConnectionError:
        raise Unproven(HUNG_UP) from None
    if not proof.is_answered_by(answer):
        raise Unproven("the server does not know the secret of this run")
    return Connection(peer, proof.seals())


def _exactly(peer: socket.socket, count: int, until: float) -> bytes:
    data = b""
    while len(data) < count:
        peer.settimeout(max(0.001, until - time.monotonic()))
        more = peer.recv(count - len(data))
        if not more:
            raise Unproven(HUNG_UP)
        data += more
    return data


class Link:
    """One end of a connection in an event loop, which queues data while the socket is full."""

    def __init__(self, connection: Connection) -> None:
        self.socket, self._seals = connection.socket, connection.seals
        self.socket.setblocking(False)
        self.is_open = True
        self.queued_bytes = self.sent_bytes = 0
        """Size in bytes of all messages so far, and of the part that the socket has accepted."""
        self._unsent = bytearray()

    @property
    def has_unsent(self) -> bool:
        """True if the socket has not accepted all queued bytes yet."""
        return bool(self._unsent)

    @property
    def events(self) -> int:
        """The selector events to wait for on the socket."""
        return selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent else 0)

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message, or queue it if the socket's buffer is full.

        Drops the message if the peer is gone.
        """
        frame = self._seals.frame(encode(message))
        self._unsent += frame
        self.queued_bytes += len(frame)
        self.flush()

    def flush(self) -> None:
        """Send as many queued bytes as the socket accepts."""
        try:
            while self._unsent:
                count = self.socket.send(self._unsent)
                self.sent_bytes += count
                del self._unsent[:count]
        except BlockingIOError:
            return
        except OSError:
            # The peer is gone. Do not close the socket yet: `read` first returns the messages that
            # the peer sent earlier, and then reaches the end of the stream.
            self._unsent.clear()
            self.sent_bytes = self.queued_bytes

    def read(self) -> Iterator[dict[str, Any]]:
        """Yield the messages received so far.

        Sets `is_open` to False at the end of the stream, or if a message has a wrong MAC.
        """
        try:
            while data := self.socket.recv(CHUNK):
                self._seals.take(data)
            self.is_open = False
        except BlockingIOError:
            pass  # everything that has arrived is read
        except OSError:
            self.is_open = False
        try:
            while (message := self._seals.next()) is not None:
                yield decode(message)
        except Forged:
            self.is_open = False

    def close(self) -> None:
        self.is_open = False
        self.socket.close()


# -- accepting connections --------------------------------------------------------------------


def listen(address: str) -> socket.socket:
    """Listen on `address`, on a free port chosen by the kernel. Raise OSError on failure."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, 0), family=family, backlog=1024)
    _opened.add(listener)
    return listener


@dataclass(eq=False)
class _Stranger:
    """A peer that has connected but not authenticated yet."""

    peer: socket.socket
    until: float
    nonce: bytes
    received: bytes = b""


class Acceptor:
    """Accepts connections and authenticates several peers concurrently.

    Used as a context manager, it closes the connections to unauthenticated peers on exit, but
    neither `listener` nor `bell`.

    Args:
        listener: The listening socket.
        secret: The secret that peers must know.
        role: This process's role. Peers that want to reach a different role are disconnected.
        bell: A socket that makes `accept` return None once it becomes readable.
    """

    def __init__(
        self,
        listener: socket.socket,
        secret: bytes,
        role: bytes,
        bell: socket.socket | None = None,
    ) -> None:
        self._listener, self._secret, self._role, self._bell = listener, secret, role, bell
        self._strangers: list[_Stranger] = []
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        if bell is not None:
            self._selector.register(bell, selectors.EVENT_READ)

    def __enter__(self) -> Acceptor:
        return self

    def __exit__(self, *_: object) -> None:
        for stranger in list(self._strangers):
            self._turn_away(stranger)
        self._selector.close()

    def accept(self, until: float | None = None) -> Connection | None:
        """Return the next authenticated connection.

        Returns None if the bell becomes readable, or at the monotonic time `until`.
        """
        while until is None or time.monotonic() < until:
            # All strangers get the same time to authenticate, so the first one times out first.
            times = [each.until for each in self._strangers[:1]]
            times += [] if until is None else [until]
            wait = max(0.0, min(times) - time.monotonic()) if times else None
            for key, _ in self._selector.select(wait):
                if key.fileobj is self._bell:
                    return None
                if key.fileobj is self._listener:
                    self._greet_next()
                elif key.data in self._strangers and (proven := self._read_proof(key.data)):
                    return proven
            now = time.monotonic()
            for late in [each for each in self._strangers if each.until < now]:
                self._turn_away(late)
        return None

    def _greet_next(self) -> None:
        """Accept the next peer and send it a nonce."""
        try:
            peer, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError:  # the peer is gone, or this process is out of file descriptors
            if self._strangers:
                self._turn_away(self._strangers[0])
            else:
                time.sleep(RETRY)
            return
        # Silent strangers must not use up the file descriptors of this process.
        if len(self._strangers) == MOST:
            self._turn_away(self._strangers[0])
        peer.setblocking(False)
        stranger = _Stranger(peer, time.monotonic() + PATIENCE, os.urandom(NONCE))
        self._strangers.append(stranger)
        self._selector.register(peer, selectors.EVENT_READ, stranger)
        try:
            peer.send(stranger.nonce)  # never blocks: it fits into the buffer of a new connection
        except OSError:
            self._turn_away(stranger)

    def _read_proof(self, stranger: _Stranger) -> Connection | None:
        """Read more of a peer's proof.

        Returns the connection if the proof is complete and valid, otherwise None.
        """
        try:
            # Do not read past the proof: the messages that follow belong to the connection.
            more = stranger.peer.recv(CLAIM - len(stranger.received))
        except BlockingIOError:
            return None
        except OSError:
            more = b""
        stranger.received += more
        if more and len(stranger.received) < CLAIM:
            return None
        proof = Proof(self._secret, self._role, stranger.nonce, stranger.received[:NONCE] or None)
        if not more or not proof.is_proven_by(stranger.received):
            self._turn_away(stranger)
            return None
        self._forget(stranger)
        stranger.peer.setblocking(True)
        with suppress(OSError):  # the peer is gone: the handler will notice when it reads
            stranger.peer.sendall(proof.answer)
        return Connection(stranger.peer, proof.seals(accepts=True))

    def _turn_away(self, stranger: _Stranger) -> None:
        self._forget(stranger)
        stranger.peer.close()

    def _forget(self, stranger: _Stranger) -> None:
        self._strangers.remove(stranger)
        self._selector.unregister(stranger.peer)


class Server:
    """Accepts connections in a thread and calls `handle` for each.

    It owns `listener`. If `one_by_one` is true, connections are handled one after the other in the
    accepting thread, otherwise each in its own thread. If a handler raises OSError, or an error
    caused by a malformed message, only that connection is closed.
    """

    def __init__(
        self,
        listener: socket.socket,
        secret: bytes,
        role: bytes,
        handle: Callable[[Connection], None],
        *,
        name: str,
        one_by_one: bool = False,
    ) -> None:
        self._handle, self._name, self._one_by_one = handle, name, one_by_one
        self._bell, rung = socket.socketpair()
        self._handlers: dict[Connection, threading.Thread] = {}
        self._lock = threading.Lock()
        _opened.update((listener, self._bell, rung))
        self._thread = self._start(self._accept, listener, secret, role, rung)

    def accept_no_more(self, seconds: float | None = None) -> None:
        """Stop accepting connections. Wait at most `seconds` seconds for the accepting thread."""
        self._bell.close()
        self._thread.join(seconds)

    def close(self, seconds: float | None = None) -> None:
        """Close all connections. Wait at most `seconds` seconds for each handler."""
        self.accept_no_more(seconds)
        with self._lock:
            handlers = dict(self._handlers)
        for connection, thread in handlers.items():
            # shutdown, unlike close, wakes a handler that is blocked in a read.
            with suppress(OSError):  # the connection was closed in the meantime
                connection.socket.shutdown(socket.SHUT_RDWR)
            thread.join(seconds)

    def _accept(
        self, listener: socket.socket, secret: bytes, role: bytes, bell: socket.socket
    ) -> None:
        with listener, bell, Acceptor(listener, secret, role, bell) as acceptor:
            while (connection := acceptor.accept()) is not None:
                if self._one_by_one:
                    self._serve(connection)
                else:
                    with self._lock:
                        self._handlers[connection] = self._start(self._serve, connection)

    def _serve(self, connection: Connection) -> None:
        # A malformed message must not stop the thread that accepts other connections.
        malformed = ValueError, KeyError, TypeError, struct.error
        with connection, suppress(OSError, *malformed):
            self._handle(connection)
        with self._lock:
            self._handlers.pop(connection, None)

    def _start(self, target: Callable[..., None], *given: Any) -> threading.Thread:
        # A daemon, so that the process can exit without waiting for a peer that does not answer.
        thread = threading.Thread(target=target, args=given, name=self._name, daemon=True)
        thread.start()
        return thread


# -- one request to many ----------------------------------------------------------------------


class Endpoint(NamedTuple):
    """A server's address, port and role (see authentication.py)."""

    address: str
    port: int
    role: bytes


def call_all(
    places: Mapping[K, Endpoint], secret: bytes, request: Any, patience: float
) -> dict[K, Any]:
    """Send the same request to all servers at once.

    Args:
        places: The servers by key.
        secret: The run's secret.
        request: The request: JSON values, which may contain bytes.
        patience: Seconds to wait for replies.

    Returns:
        The replies that arrived in time, by server key.
    """
    # Each request uses its own connection, so a late reply cannot be mistaken for another one.
    message = encode(request)
    until = time.monotonic() + patience
    replies: dict[K, Any] = {}
    with selectors.DefaultSelector() as selector:
        for key, place in places.items():
            try:
                peer = socket.socket(socket.AF_INET6 if ":" in place.address else socket.AF_INET)
            except OSError:  # out of file descriptors: return the other servers' replies
                continue
            peer.setblocking(False)
            peer.connect_ex((place.address, place.port))
            # One generator per connection runs the protocol. It receives bytes through `send` and
            # returns the reply.
            steps = _one_call(peer, secret, place.role, message)
            next(steps)
            selector.register(peer, selectors.EVENT_READ, (key, peer, steps))
        while selector.get_map() and (left := until - time.monotonic()) > 0:
            for ready, _ in selector.select(left):
                key, peer, steps = ready.data
                try:
                    steps.send(peer.recv(CHUNK))
                    continue
                except StopIteration as end:
                    replies[key] = end.value
                except (OSError, ValueError):  # refused, gone, or not authenticated
                    pass
                selector.unregister(peer)
                peer.close()
        for ready in list(selector.get_map().values()):
            ready.data[1].close()
    return replies


def _one_call(
    peer: socket.socket, secret: bytes, role: bytes, message: bytes
) -> Generator[None, bytes, Any]:
    """Authenticate, send `message` and return the reply.

    The caller sends the received bytes to the generator, and b"" at the end of the stream. Raises
    OSError or ValueError if there is no authentic reply.
    """
    received = bytearray()
    proof = Proof(secret, role, (yield from _take(received, NONCE)))
    seals = proof.seals()
    # Send the request before the server has proved itself, to save a round trip. This is safe
    # because requests contain no secrets. Proof and request fit into the buffer of a new
    # connection, so this does not block.
    peer.sendall(proof.words + seals.frame(message))
    if not proof.is_answered_by((yield from _take(received, MAC))):
        raise Unproven("the server does not know the secret of this run")
    seals.take(bytes(received))
    while (reply := seals.next()) is None:
        data = yield
        if not data:
            raise ConnectionError("the connection ended")
        seals.take(data)
    return decode(reply)


def _take(received: bytearray, count: int) -> Generator[None, bytes, bytes]:
    """Remove and return the first `count` bytes of `received`, once they have arrived."""
    while len(received) < count:
        data = yield
        if not data:
            raise Unproven(HUNG_UP)
        received += data
    taken = bytes(received[:count])
    del received[:count]
    return taken


def _close_in_forked_child() -> None:
    """Close all connections in a forked child, such as a DataLoader worker."""
    # If a copy of a socket stayed open in the child, peers would not notice that the parent has
    # exited, and the child might answer in its place.
    for each in list(_opened):
        each.close()


os.register_at_fork(after_in_child=_close_in_forked_child)
