"""The connections over which ranks negotiate: from every rank to rank 0, and lines of JSON.

Nothing is said while nobody asks for anything. A rank that ends, however it does, is seen as the
end of its connection.
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

from shardwise import authentication
from shardwise.errors import LaunchError
from shardwise.watch import questions

Message = dict[str, Any]

HELLO = 5.0
"""Seconds that who has proved to be of the run has to say which rank it is."""

AGAIN = 0.05
"""Seconds until who was turned away tries again."""

_living: WeakSet[Link] = WeakSet()


class Link:
    """One end of a connection; what cannot be sent yet is kept. `received` has come already."""

    def __init__(self, connection: socket.socket, received: bytes = b"") -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connection
        self.is_open = True
        self.given = self.sent = 0
        """Bytes that it was given to send, and those of them that are on their way."""
        self._unsent = bytearray()
        self._received = bytearray(received)
        _living.add(self)

    @property
    def is_full(self) -> bool:
        """Whether there is more to send than there was room for."""
        return bool(self._unsent)

    @property
    def events(self) -> int:
        """What to look for on its socket."""
        return selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent else 0)

    def send(self, message: Message) -> None:
        """Send, now or as soon as there is room; to a rank that is gone, nothing."""
        line = json.dumps(message, separators=(",", ":")).encode() + b"\n"
        self._unsent += line
        self.given += len(line)
        self.flush()

    def flush(self) -> None:
        """Send what there is room for."""
        try:
            while self._unsent:
                count = self.socket.send(self._unsent)
                self.sent += count
                del self._unsent[:count]
        except BlockingIOError:
            return
        except OSError:  # its end is found by reading, after all that it said before
            self._unsent.clear()
            self.sent = self.given

    def read(self) -> Iterator[Message]:
        """The messages that have come; `is_open` is False once there will be none."""
        try:
            while data := self.socket.recv(1 << 16):
                self._received += data
            self.is_open = False
        except BlockingIOError:
            pass  # all that has come is read
        except OSError:
            self.is_open = False
        *lines, rest = self._received.split(b"\n")
        self._received = rest
        for line in lines:
            yield json.loads(line)

    def close(self) -> None:
        """Close it, which the other end sees."""
        self.is_open = False
        self.socket.close()


def accept(listener: socket.socket, secret: bytes, size: int, timeout: float) -> dict[int, Link]:
    """Rank 0's side: the link of every other rank. Raises LaunchError when one does not come."""
    found: dict[int, Link] = {}
    until = time.monotonic() + timeout
    with authentication.Acceptor(listener, secret) as acceptor:
        while len(found) < size - 1:
            connection = acceptor.accept(until)
            if connection is None:
                missing = sorted(set(range(1, size)) - found.keys())
                raise LaunchError(
                    f"hvd.init: rank(s) {missing} did not connect to rank 0 within {timeout:g} s."
                ).blaming(missing)
            connection.settimeout(HELLO)
            with suppress(OSError, ValueError):
                hello, more = _hello(connection)
                found[int(hello)] = Link(connection, more)
                continue
            connection.close()
    return found


def connect(address: str, port: int, secret: bytes, rank: int, timeout: float) -> Link:
    """The others' side. Raises LaunchError where rank 0 cannot be reached."""
    until = time.monotonic() + timeout
    while True:
        try:
            connection = socket.create_connection((address, port), timeout)
            authentication.prove(connection, secret, until)
            connection.sendall(f"{rank}\n".encode())
        except OSError as error:
            # Where many strangers crowd in, rank 0 turns away who was not quick enough.
            if isinstance(error, authentication.Unproven):
                connection.close()
                if time.monotonic() < until:
                    time.sleep(AGAIN)
                    continue
            raise LaunchError(
                f"hvd.init: rank {rank} cannot connect to rank 0 at {address}:{port}: {error}."
            ).blaming([0]) from error
        return Link(connection)


def listen(address: str) -> socket.socket:
    """Where rank 0 is connected to."""
    return questions.listen(address)


def send_up_to(upto: Mapping[int, int], links: Mapping[int, Link]) -> None:
    """Return when `upto` bytes by rank are sent. More may have to wait: a rank that does not read
    may be in an operation that waits for this one."""
    while True:
        full = [link for link in links.values() if link.is_open and link.is_full]
        if not any(
            links[rank] in full and links[rank].sent < count for rank, count in upto.items()
        ):
            return
        with selectors.DefaultSelector() as selector:
            for link in full:
                selector.register(link.socket, selectors.EVENT_WRITE)
            selector.select(1.0)
        for link in full:
            link.flush()


def _hello(connection: socket.socket) -> tuple[bytes, bytes]:
    """The first line, and what has come after it: a rank asks as soon as it has connected."""
    data = b""
    while b"\n" not in data:
        more = connection.recv(256)
        if not more or len(data) > 256:
            raise ValueError("no hello")
        data += more
    line, _, rest = data.partition(b"\n")
    return line, rest


def _in_forked_child() -> None:
    """A forked DataLoader worker must not hold our sockets open: the end of its rank would not be
    seen."""
    for link in list(_living):
        link.close()


os.register_at_fork(after_in_child=_in_forked_child)
