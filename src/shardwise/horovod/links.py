"""Connects every rank to rank 0 with authenticated links (net/rpc.py), for negotiation messages.

Nothing is sent while no rank requests an operation. When a rank exits or is killed, the other end
of its link reaches the end of the stream.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from shardwise.errors import LaunchError
from shardwise.net import rpc
from shardwise.net.rpc import Link

NegotiationMessage = dict[str, Any]

HELLO_SECONDS = 5.0
"""Seconds within which an authenticated peer must send its rank."""

RETRY_SECONDS = 0.05
"""Seconds before a rejected rank connects again."""


def accept(listener: socket.socket, secret: bytes, size: int, timeout: float) -> dict[int, Link]:
    """On rank 0, accept the links of all other ranks. Raises LaunchError if one is missing."""
    found: dict[int, Link] = {}
    until = time.monotonic() + timeout
    role = _role(listener.getsockname()[1])
    with rpc.Acceptor(listener, secret, role) as acceptor:
        while len(found) < size - 1:
            connection = acceptor.accept(until)
            if connection is None:
                missing = sorted(set(range(1, size)) - found.keys())
                raise LaunchError(
                    f"hvd.init: rank(s) {missing} did not connect to rank 0 within {timeout:g} s. "
                    "Every rank must call hvd.init(); --timeout sets how long to wait."
                ).blaming(missing)
            connection.socket.settimeout(HELLO_SECONDS)
            with suppress(OSError, ValueError):
                rank = int(connection.receive() or b"")  # before Link makes it non-blocking
                found[rank] = Link(connection)
                continue
            connection.close()
    return found


def connect(address: str, port: int, secret: bytes, rank: int, timeout: float) -> Link:
    """Connect to rank 0. Raises LaunchError if it cannot be reached."""
    until = time.monotonic() + timeout
    while True:
        try:
            connection = rpc.connect((address, port), secret, _role(port), until)
            connection.send(str(rank).encode())
        except OSError as error:
            # While many strangers connect, rank 0 drops peers that were too slow to authenticate.
            if isinstance(error, rpc.Unproven) and time.monotonic() < until:
                time.sleep(RETRY_SECONDS)
                continue
            raise LaunchError(
                f"hvd.init: rank {rank} cannot connect to rank 0 at {address}:{port}: {error}."
            ).blaming([0]) from error
        return Link(connection)


def send_up_to(upto: Mapping[int, int], links: Mapping[int, Link]) -> None:
    """Wait until `upto[rank]` bytes have been sent to each rank."""
    # Do not wait until everything is sent, which could deadlock: a rank that does not read may be
    # inside a collective that waits for this rank.
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
    """Return the name of rank 0's role in authentication (net/authentication.py)."""
    # It includes the port, so that a proof for one listener is useless at another.
    return f"horovod {port}".encode()
