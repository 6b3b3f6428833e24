"""Forwards data between a host's ranks and the exchanges that they take part in.

    rank  ─▶ {"label": label, ...} + a file in memory              the rank's contribution
    rank  ─▶ {"back": true}                                       the rank asks to be admitted
    rank  ─▶ {"who": true}                                        the rank asks who is missing
    rank ◀─  {"islands": [...], "members": [...], ...} + files    the others' contributions

The data is stored in anonymous in-memory files, and only descriptors are passed on. The other ranks
therefore receive a rank's contribution even if the rank has exited. The sockets have no name, and
only the ranks hold the other ends.
"""

from __future__ import annotations

import json
import os
import secrets
import selectors
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from threading import Lock
from typing import Any, Protocol

from shardwise.errors import LaunchError

LONGEST = 1 << 16
"""Maximum size of a message in bytes."""

TOO_MANY = (
    "too many open files for this number of islands, or the limit `ulimit -n` is reached. Raise "
    "the limit, or use fewer islands."
)
"""The reason shown in errors if a file descriptor was not received."""

Key = tuple[int, int]
"""Identifies a file: the rank that contributed it, and its number at the broker of its host."""


@dataclass(frozen=True, kw_only=True)
class Contribution:
    """A file that a rank contributes to an exchange.

    Attributes:
        rank: The rank that contributes.
        number: The file's number at the broker of the rank's host.
        size: The file's size in bytes.
        label: The name of the exchange.
        alone: True if only the rank's peers take part in the exchange, False if all ranks do.
        resumes: True if the rank would resume from a checkpoint if it were restarted.
    """

    rank: int
    number: int
    size: int
    label: str
    alone: bool
    resumes: bool

    @property
    def key(self) -> Key:
        """The file's key, which is unique across all hosts."""
        return self.rank, self.number


@dataclass(frozen=True, kw_only=True)
class Delivery:
    """A message for a rank: its content `words`, and the keys of the files sent with it."""

    rank: int
    words: dict[str, Any]
    keys: Sequence[Key] = ()


class BrokerEvents(Protocol):
    """Receives messages from ranks.

    Implemented by `Exchanges`, and by agents, which forward the messages.
    """

    def contribute(self, what: Contribution) -> None:
        """Record that a rank has contributed to an exchange, and is waiting for the answer."""

    def request_return(self, rank: int) -> None:
        """Record that `rank`, whose island was removed, asks to be admitted."""

    def report_missing(self, rank: int) -> None:
        """Tell `rank` which ranks its exchange is still waiting for."""


class HostBroker:
    """Holds the links to this host's ranks, and the files from all hosts that these ranks need.

    It runs in `selector`'s event loop, and reports to `events`.
    """

    def __init__(self, selector: selectors.BaseSelector, events: BrokerEvents) -> None:
        self._selector = selector
        self._events = events
        self._links: dict[int, socket.socket] = {}
        self._files: dict[Key, int] = {}
        self._lock = Lock()
        """Guards `_files`, because another thread sends files to other hosts."""
        self._numbers = count(1 + secrets.randbits(40))
        """File numbers.

        They start at a random value, because messages of an earlier broker on this host may still
        be in transit.
        """

    def open(self, rank: int) -> socket.socket:
        """Open a link to `rank`, and return the end of the socket that the rank inherits."""
        # SEQPACKET preserves message boundaries and can pass descriptors.
        broker_end, rank_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        broker_end.setblocking(False)
        self.shut([rank])
        self._links[rank] = broker_end
        self._selector.register(
            broker_end, selectors.EVENT_READ, partial(self._hear, rank, broker_end)
        )
        return rank_end

    def shut(self, ranks: Sequence[int]) -> None:
        """Close the links to `ranks`, if they exist."""
        for rank in ranks:
            if (link := self._links.pop(rank, None)) is not None:
                self._selector.unregister(link)
                link.close()

    def close(self) -> None:
        self.shut(list(self._links))
        self.settle((), list(self._files))

    def keep(self, key: Key, fd: int) -> None:
        """Store the file descriptor `fd` under `key`. The broker closes it later."""
        with self._lock:
            self._files[key] = fd

    def read(self, key: Key) -> bytes:
        fd = self._files[key]
        return os.pread(fd, os.fstat(fd).st_size, 0)

    def write(self, key: Key, data: bytes) -> None:
        """Store `data` in a new file under `key`."""
        fd = os.memfd_create("shardwise-island", os.MFD_CLOEXEC)
        # Duplicate `fd`, because closing the file object closes its descriptor.
        with os.fdopen(os.dup(fd), "wb") as file:
            file.write(data)
        self.keep(key, fd)

    def copy(self, key: Key) -> int | None:
        """Return a new descriptor for the file `key`, or None if the file is not on this host.

        The caller closes the descriptor. Safe to call from any thread.
        """
        with self._lock:
            fd = self._files.get(key)
            return None if fd is None else os.dup(fd)

    def settle(self, deliveries: Sequence[Delivery], dropped: Sequence[Key]) -> None:
        """Deliver messages and files to ranks, then delete the files in `dropped`."""
        # Deliver first, because a delivery may contain a file that is to be dropped.
        for delivery in deliveries:
            self._send(delivery)
        with self._lock:
            for key in dropped:
                if (fd := self._files.pop(key, None)) is not None:
                    os.close(fd)

    def _hear(self, rank: int, link: socket.socket) -> None:
        """Receive a message from `rank`, and report it to `events`."""
        # An earlier event in the same iteration of the event loop may have closed the link.
        if self._links.get(rank) is not link:
            return
        try:
            data, fds, flags, _ = socket.recv_fds(link, LONGEST, 1)
        except BlockingIOError:
            return
        except ConnectionError:
            data, fds, flags = b"", [], 0
        if flags & socket.MSG_CTRUNC:
            raise LaunchError(f"The file of rank {rank} cannot be received: {TOO_MANY}")
        if not data:  # the rank has exited or is exiting; its files stay valid
            self.shut([rank])
            return
        message = json.loads(data)
        if "back" in message:
            self._events.request_return(rank)
        elif "who" in message:
            self._events.report_missing(rank)
        else:
            self._take(rank, message, fds[0])

    def _take(self, rank: int, message: dict[str, Any], fd: int) -> None:
        """Store the file `fd` from `rank`, and report the contribution."""
        contribution = Contribution(
            rank=rank,
            number=next(self._numbers),
            size=os.fstat(fd).st_size,
            label=message["label"],
            alone=message["alone"],
            resumes=message["resumes"],
        )
        self.keep(contribution.key, fd)
        self._events.contribute(contribution)

    def _send(self, delivery: Delivery) -> None:
        link = self._links.get(delivery.rank)
        if link is None:
            return
        fds = [self._files[key] for key in delivery.keys]
        try:
            socket.send_fds(link, [json.dumps(delivery.words).encode()], fds)
        except ConnectionError:  # the rank has just exited
            return
        except OSError as error:
            raise LaunchError(
                f"Files of other islands cannot be sent to rank {delivery.rank} "
                f"({error.strerror}): {TOO_MANY}"
            ) from None
