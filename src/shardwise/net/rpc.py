"""Authenticated messages over TCP between the processes of a run.

    accepts   ─▶ a nonce
    connects  ─▶ a nonce and its proof          (authentication.py)
    accepts   ─▶ its own proof
    both      ─▶ messages: length, MAC, content

    Server      accepts connections in a thread, and handles each
    connect     one connection, whose calls block; `call` sends a request and returns the reply
    call_all    one request to many servers at once
    Link        one end of a connection in an event loop, whose calls do not block

A peer without the secret is cut off before any other byte of it is read, and one that says nothing
keeps nobody waiting.

Four protocols do not use this one. The messages of an ssh agent ride on the standard streams of
ssh, which has authenticated both ends, between lines that a login prints (launch/ssh/protocol.py).
The other three use Unix sockets, because they pass file descriptors on or are on the hot path:
comm/socket_mesh.py, the links between rank and launcher, and the fork server of tools/verify.
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
"""Seconds within which a peer that connects must prove itself."""

MOST = 128
"""The number of peers that may be proving themselves at a time."""

RETRY = 0.05
"""Seconds until a listener that had no descriptor left accepts again."""

CHUNK = 1 << 16

HUNG_UP = "who listens there hung up: it knows another secret, or is of another run"

_opened: WeakSet[socket.socket] = WeakSet()


class Unproven(OSError):
    """The other end of a connection has not proved that it knows the secret."""


# -- one connection ---------------------------------------------------------------------------


class Connection:
    """A connection whose two ends have proved themselves, for threads that may block. A context."""

    def __init__(self, peer: socket.socket, seals: Seals) -> None:
        self.socket = peer
        self.seals = seals
        _opened.add(peer)
        with suppress(OSError):  # the peer has left, which the first read or write will find
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, message: bytes) -> None:
        """Send a message."""
        self.socket.sendall(self.seals.frame(message))

    def receive(self) -> bytes | None:
        """Return the next message; None at the end of the stream. Raises Forged.

        It reads no byte beyond that message: a transfer's bulk data may follow.
        """
        while (message := self.seals.next()) is None:
            data = self.socket.recv(min(self.seals.missing, CHUNK))
            if not data:
                return None
            self.seals.take(data)
        return message

    def call(self, request: Any, seconds: float) -> Any:
        """Send a request, and return the reply that comes within `seconds` of silence.

        Raises OSError without a reply, and Forged. Replies have no number: close the connection
        after an error, since a late reply would be taken for that of the next request.
        """
        self.socket.settimeout(seconds)
        self.send(encode(request))
        reply = self.receive()
        if reply is None:
            raise ConnectionError("the connection ended")
        return decode(reply)

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()


def encode(message: Any) -> bytes:
    """Encode a message as JSON, which may hold bytes."""
    return json.dumps(message, separators=(",", ":"), default=_replace_bytes).encode()


def decode(data: bytes) -> Any:
    """Decode what `encode` has encoded. Raises ValueError."""
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
    """Connect to the server of a `role` at `place`, until a time of the monotonic clock.

    `reach` limits the seconds for the connection alone. Raises OSError; Unproven if the server
    knows another secret, has another role or hangs up.
    """
    left = max(0.001, until - time.monotonic())
    peer = socket.create_connection(place, timeout=left if reach is None else min(reach, left))
    try:
        return prove(peer, secret, role, until)
    except BaseException:
        peer.close()
        raise


def prove(peer: socket.socket, secret: bytes, role: bytes, until: float) -> Connection:
    """Prove oneself to the server behind `peer`, and check its proof. Raises as `connect`."""
    try:
        proof = Proof(secret, role, _exactly(peer, NONCE, until))
        peer.sendall(proof.words)
        answer = _exactly(peer, MAC, until)
    except ConnectionError:
        raise Unproven(HUNG_UP) from None
    if not proof.is_answered_by(answer):
        raise Unproven("who listens there does not know the secret of this run")
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
    """One end of a connection in an event loop. It queues bytes that the socket has no room for."""

    def __init__(self, connection: Connection) -> None:
        self.socket, self._seals = connection.socket, connection.seals
        self.socket.setblocking(False)
        self.is_open = True
        self.queued_bytes = self.sent_bytes = 0
        """Bytes of all messages so far, and the number of them that the socket has taken."""
        self._unsent = bytearray()

    @property
    def has_unsent(self) -> bool:
        """Whether some bytes do not fit into the socket yet."""
        return bool(self._unsent)

    @property
    def events(self) -> int:
        """The selector events to wait for on the socket."""
        return selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent else 0)

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message, now or once the socket has room. Does nothing if the peer is gone."""
        frame = self._seals.frame(encode(message))
        self._unsent += frame
        self.queued_bytes += len(frame)
        self.flush()

    def flush(self) -> None:
        """Send as many unsent bytes as the socket takes."""
        try:
            while self._unsent:
                count = self.socket.send(self._unsent)
                self.sent_bytes += count
                del self._unsent[:count]
        except BlockingIOError:
            return
        except OSError:  # `read` finds the end, after all messages that the peer sent before
            self._unsent.clear()
            self.sent_bytes = self.queued_bytes

    def read(self) -> Iterator[dict[str, Any]]:
        """Yield the messages received so far. Clears `is_open` at the end of the stream, and at a
        message that the other end has not sealed."""
        try:
            while data := self.socket.recv(CHUNK):
                self._seals.take(data)
            self.is_open = False
        except BlockingIOError:
            pass  # all that has arrived is read
        except OSError:
            self.is_open = False
        try:
            while (message := self._seals.next()) is not None:
                yield decode(message)
        except Forged:
            self.is_open = False

    def close(self) -> None:
        """Close the connection."""
        self.is_open = False
        self.socket.close()


# -- accepting connections --------------------------------------------------------------------


def listen(address: str) -> socket.socket:
    """Listen at `address`, on a port that the kernel chooses. Raises OSError."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, 0), family=family, backlog=1024)
    _opened.add(listener)
    return listener


@dataclass(eq=False)
class _Stranger:
    """A peer that has connected and not proved itself yet."""

    peer: socket.socket
    until: float
    nonce: bytes
    said: bytes = b""


class Acceptor:
    """Accepts connections of peers that prove that they know `secret`, several at a time.

    `role` is that of this process; peers that mean another one are turned away. `bell` is a socket:
    once something, or its end, has arrived there, `accept` returns None. A context, which closes
    neither the listener nor the bell.
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
        """Return the next connection that has proved itself; None when the bell has rung, or at
        `until`, a time of the monotonic clock."""
        while until is None or time.monotonic() < until:
            # The oldest stranger stands first, and all have the same time to prove themselves.
            times = [each.until for each in self._strangers[:1]]
            times += [] if until is None else [until]
            wait = max(0.0, min(times) - time.monotonic()) if times else None
            for key, _ in self._selector.select(wait):
                if key.fileobj is self._bell:
                    return None
                if key.fileobj is self._listener:
                    self._let_in()
                elif key.data in self._strangers and (proven := self._hear(key.data)) is not None:
                    return proven
            now = time.monotonic()
            for late in [each for each in self._strangers if each.until < now]:
                self._turn_away(late)
        return None

    def _let_in(self) -> None:
        """Send a nonce to the next peer that has connected."""
        try:
            peer, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError:  # the peer has left again, or there is no descriptor for it
            if self._strangers:
                self._turn_away(self._strangers[0])
            else:
                time.sleep(RETRY)
            return
        # Strangers who connect and say nothing must not use up the descriptors of this process.
        if len(self._strangers) == MOST:
            self._turn_away(self._strangers[0])
        peer.setblocking(False)
        stranger = _Stranger(peer, time.monotonic() + PATIENCE, os.urandom(NONCE))
        self._strangers.append(stranger)
        self._selector.register(peer, selectors.EVENT_READ, stranger)
        try:
            peer.send(stranger.nonce)  # it fits into the buffer of a new connection
        except OSError:
            self._turn_away(stranger)

    def _hear(self, stranger: _Stranger) -> Connection | None:
        """Read more of a proof, and not a byte beyond it. Return the connection if it holds."""
        try:
            more = stranger.peer.recv(CLAIM - len(stranger.said))
        except BlockingIOError:
            return None
        except OSError:
            more = b""
        stranger.said += more
        if more and len(stranger.said) < CLAIM:
            return None
        proof = Proof(self._secret, self._role, stranger.nonce, stranger.said[:NONCE] or None)
        if not more or not proof.is_proven_by(stranger.said):
            self._turn_away(stranger)
            return None
        self._forget(stranger)
        stranger.peer.setblocking(True)
        with suppress(OSError):  # the peer has left, which its handler finds by reading
            stranger.peer.sendall(proof.answer)
        return Connection(stranger.peer, proof.seals(accepts=True))

    def _turn_away(self, stranger: _Stranger) -> None:
        self._forget(stranger)
        stranger.peer.close()

    def _forget(self, stranger: _Stranger) -> None:
        self._strangers.remove(stranger)
        self._selector.unregister(stranger.peer)


class Server:
    """Accepts connections at `listener`, which it owns, and calls `handle` with each.

    Each connection has a thread of its own, or with `one_by_one` all of them share one thread. A
    handler that raises OSError, or an error of a malformed message, ends its connection alone.
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
        """Accept nobody from now on. Waits for the thread, `seconds` at most."""
        self._bell.close()
        self._thread.join(seconds)

    def close(self, seconds: float | None = None) -> None:
        """Close all connections. Waits for each handler, `seconds` at most."""
        self.accept_no_more(seconds)
        with self._lock:
            handlers = dict(self._handlers)
        for connection, thread in handlers.items():
            with suppress(OSError):  # it has ended meanwhile
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
        # A message of another form than expected must not end the thread that accepts others.
        malformed = ValueError, KeyError, TypeError, struct.error
        with connection, suppress(OSError, *malformed):
            self._handle(connection)
        with self._lock:
            self._handlers.pop(connection, None)

    def _start(self, target: Callable[..., None], *given: Any) -> threading.Thread:
        # A daemon, since the end of a process must not wait for a peer that does not answer.
        thread = threading.Thread(target=target, args=given, name=self._name, daemon=True)
        thread.start()
        return thread


# -- one request to many ----------------------------------------------------------------------


class Endpoint(NamedTuple):
    """The place of a server: `port` of `address`, in a `role` (see authentication.py)."""

    address: str
    port: int
    role: bytes


def call_all(
    places: Mapping[K, Endpoint], secret: bytes, request: Any, patience: float
) -> dict[K, Any]:
    """Send a request to all servers at once. Returns the replies that arrive within `patience`
    seconds, by the key of their place.

    Nothing is left of a server that does not answer, since each has a separate connection.
    """
    message = encode(request)
    until = time.monotonic() + patience
    replies: dict[K, Any] = {}
    with selectors.DefaultSelector() as selector:
        for key, place in places.items():
            try:
                peer = socket.socket(socket.AF_INET6 if ":" in place.address else socket.AF_INET)
            except OSError:  # no more descriptors: the replies of the others will do
                continue
            peer.setblocking(False)
            peer.connect_ex((place.address, place.port))
            # A generator per connection: it takes received bytes, and returns the reply.
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
                except (OSError, ValueError):  # refused, gone, or without the secret
                    pass
                selector.unregister(peer)
                peer.close()
        for ready in list(selector.get_map().values()):
            ready.data[1].close()
    return replies


def _one_call(
    peer: socket.socket, secret: bytes, role: bytes, message: bytes
) -> Generator[None, bytes, Any]:
    """Prove oneself, send `message` and return the reply. It is sent the bytes that arrive, none at
    the end of the stream. Raises OSError and ValueError."""
    heard = bytearray()
    proof = Proof(secret, role, (yield from _taken(heard, NONCE)))
    seals = proof.seals()
    # Sent before the server has proved itself, which saves a round trip: a request is no secret.
    # Both fit into the buffer of a new connection.
    peer.sendall(proof.words + seals.frame(message))
    if not proof.is_answered_by((yield from _taken(heard, MAC))):
        raise Unproven("who listens there does not know the secret of this run")
    seals.take(bytes(heard))
    while (reply := seals.next()) is None:
        data = yield
        if not data:
            raise ConnectionError("the connection ended")
        seals.take(data)
    return decode(reply)


def _taken(heard: bytearray, count: int) -> Generator[None, bytes, bytes]:
    """Return the first `count` bytes of `heard`, once they have arrived."""
    while len(heard) < count:
        data = yield
        if not data:
            raise Unproven(HUNG_UP)
        heard += data
    taken = bytes(heard[:count])
    del heard[:count]
    return taken


def _in_forked_child() -> None:
    """Close all connections in a forked child, such as a DataLoader worker: a copy that stays open
    would hide the end of this process from its peers, and answer in its place."""
    for each in list(_opened):
        each.close()


os.register_at_fork(after_in_child=_in_forked_child)
