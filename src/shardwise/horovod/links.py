"""Connections from every rank to rank 0 that carry negotiation messages, as sealed JSON.

Nothing is sent while no rank requests an operation. A rank that ends, however it does, closes its
connection, which the other end reads as the end of the stream.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any
from weakref import WeakSet

from shardwise.errors import LaunchError
from shardwise.net import authentication
from shardwise.watch import questions

NegotiationMessage = dict[str, Any]

HELLO_SECONDS = 5.0
"""Seconds within which an authenticated peer must send its rank."""

RETRY_SECONDS = 0.05
"""Seconds until a refused rank connects again."""

_open_links: WeakSet[Link] = WeakSet()


class Link:
    """One end of a connection, with a buffer of unsent bytes."""

    def __init__(self, connection: authentication.Connection) -> None:
        self.socket, self._seals = connection.socket, connection.seals
        self.socket.setblocking(False)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.is_open = True
        self.queued_bytes = self.sent_bytes = 0
        """Bytes ever passed to `send`, and those of them that the socket has taken."""
        self._unsent = bytearray()
        _open_links.add(self)

    @property
    def has_unsent(self) -> bool:
        """Whether some bytes do not fit into the socket yet."""
        return bool(self._unsent)

    @property
    def events(self) -> int:
        """The selector events to wait for on the socket."""
        return selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent else 0)

    def send(self, message: NegotiationMessage) -> None:
        """Send a message, now or once the socket has room. Does nothing if the peer is gone."""
        frame = self._seals.frame(json.dumps(message, separators=(",", ":")).encode())
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
        except OSError:  # its end is found by reading, after all that it said before
            self._unsent.clear()
            self.sent_bytes = self.queued_bytes

    def read(self) -> Iterator[NegotiationMessage]:
        """Yield the messages received so far; clears `is_open` at the end of the stream, and at
        a message that the other end has not sealed."""
        try:
            while data := self.socket.recv(1 << 16):
                self._seals.take(data)
            self.is_open = False
        except BlockingIOError:
            pass  # all that has come is read
        except OSError:
            self.is_open = False
        try:
            while (message := self._seals.next()) is not None:
                yield json.loads(message)
        except authentication.Forged:
            self.is_open = False

    def close(self) -> None:
        """Close the connection."""
        self.is_open = False
        self.socket.close()


def accept(listener: socket.socket, secret: bytes, size: int, timeout: float) -> dict[int, Link]:
    """Accept the links of all other ranks, on rank 0. Raises LaunchError when one does not come."""
    found: dict[int, Link] = {}
    until = time.monotonic() + timeout
    role = _role(listener.getsockname()[1])
    with authentication.Acceptor(listener, secret, role) as acceptor:
        while len(found) < size - 1:
            connection = acceptor.accept(until)
            if connection is None:
                missing = sorted(set(range(1, size)) - found.keys())
                raise LaunchError(
                    f"hvd.init: rank(s) {missing} did not connect to rank 0 within {timeout:g} s."
                ).blaming(missing)
            connection.socket.settimeout(HELLO_SECONDS)
            with suppress(OSError, ValueError):
                rank = int(connection.receive() or b"")  # before Link makes it non-blocking
                found[rank] = Link(connection)
                continue
            connection.close()
    return found


def connect(address: str, port: int, secret: bytes, rank: int, timeout: float) -> Link:
    """Connect to rank 0. Raises LaunchError where it cannot be reached."""
    until = time.monotonic() + timeout
    while True:
        try:
            peer = socket.create_connection((address, port), timeout)
            connection = authentication.prove(peer, secret, _role(port), until)
            connection.send(str(rank).encode())
        except OSError as error:
            # While many strangers connect, rank 0 drops peers that were too slow to authenticate.
            if isinstance(error, authentication.Unproven):
                peer.close()
                if time.monotonic() < until:
                    time.sleep(RETRY_SECONDS)
                    continue
            raise LaunchError(
                f"hvd.init: rank {rank} cannot connect to rank 0 at {address}:{port}: {error}."
            ).blaming([0]) from error
        return Link(connection)


def listen(address: str) -> socket.socket:
    """The listening socket of rank 0."""
    return questions.listen(address)


def send_up_to(upto: Mapping[int, int], links: Mapping[int, Link]) -> None:
    """Wait until `upto[rank]` bytes are sent to each rank, and no longer.

    Waiting for more could deadlock: a rank that does not read may be inside a collective that
    waits for this one.
    """
    while True:
        full = [link for link in links.values() if link.is_open and link.has_unsent]
        if not any(
            links[rank] in full and links[rank].sent_bytes < count for rank, count in upto.items()
        ):
            return
        with selectors.DefaultSelector() as selector:
            for link in full:
                selector.register(link.socket, selectors.EVENT_WRITE)
            selector.select(1.0)
        for link in full:
            link.flush()


def _role(port: int) -> bytes:
    """The role in which rank 0 accepts; see authentication.py."""
    return f"horovod {port}".encode()


def _in_forked_child() -> None:
    """Close inherited sockets. A forked DataLoader worker that kept them open would hide the end of
    its rank from the peer."""
    for link in list(_open_links):
        link.close()


os.register_at_fork(after_in_child=_in_forked_child)
