"""Brokers exchanges for the ranks of one host: takes what they bring, gives them what they get.

    rank  ─▶ {"come": label, ...} + a file in memory                  what it brings
    rank  ─▶ {"back": true}                                           it asks to be let in
    rank  ─▶ {"who": true}                                            for whom does it wait?
    rank ◀─  {"islands": [...], "members": [...], ...} + files        what the others have brought

The bytes are in anonymous files in memory, of which only descriptors are passed on. So the others
have what a rank brought even if it has ended since. The sockets have no name, and only the ranks
have their other ends.
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
"""Bytes of a message."""

TOO_MANY = (
    "there are too many open files for so many islands, or as many as `ulimit -n` allows. Raise "
    "that, or take fewer islands."
)
"""The reason to give if the descriptor of a file does not arrive."""

Key = tuple[int, int]
"""The rank that brought a file, and the number of the file at the broker of its host."""


@dataclass(frozen=True, kw_only=True)
class Contribution:
    """A file that a rank brings to an exchange.

    Attributes:
        size: Bytes of the file.
        label: The exchange.
        alone: Whether the exchange is between the ranks of equal place in the islands.
        resumes: Whether the rank continues from a checkpoint if it is started again.
    """

    rank: int
    number: int
    size: int
    label: str
    alone: bool
    resumes: bool

    @property
    def key(self) -> Key:
        """The key of the file on all hosts."""
        return self.rank, self.number


@dataclass(frozen=True, kw_only=True)
class Delivery:
    """The message `words` for a rank, with the files `keys`."""

    rank: int
    words: dict[str, Any]
    keys: Sequence[Key] = ()


class Customers(Protocol):
    """Receives what ranks bring and ask: the exchanges, or an agent that passes it on."""

    def came(self, what: Contribution) -> None:
        """A rank has come to an exchange, and waits."""

    def asks_back(self, rank: int) -> None:
        """`rank`, of an island that is gone, asks to be admitted."""

    def asks_who(self, rank: int) -> None:
        """`rank` asks for whom it waits."""


class HostBroker:
    """The links to the ranks of this host, and the files of ranks of all hosts that they need.

    It runs in the event loop of `selector`, and reports to `told`.
    """

    def __init__(self, selector: selectors.BaseSelector, told: Customers) -> None:
        self._selector = selector
        self._told = told
        self._links: dict[int, socket.socket] = {}
        self._files: dict[Key, int] = {}
        self._lock = Lock()
        """Guards the files: another thread sends them to other hosts."""
        self._numbers = count(1 + secrets.randbits(40))
        """Random, so that they differ from those of an earlier broker of this host, whose messages
        may still be in transit."""

    def open(self, rank: int) -> socket.socket:
        """Open a link to `rank`, and return the end that the rank inherits."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        self.shut([rank])
        self._links[rank] = ours
        self._selector.register(ours, selectors.EVENT_READ, partial(self._hear, rank, ours))
        return theirs

    def shut(self, ranks: Sequence[int]) -> None:
        """Close the links to those of `ranks` that have one."""
        for rank in ranks:
            if (link := self._links.pop(rank, None)) is not None:
                self._selector.unregister(link)
                link.close()

    def close(self) -> None:
        """Close all links and files."""
        self.shut(list(self._links))
        self.settle((), list(self._files))

    def keep(self, key: Key, fd: int) -> None:
        """Keep the file `fd` as `key`. The broker closes it."""
        with self._lock:
            self._files[key] = fd

    def read(self, key: Key) -> bytes:
        """Return the bytes of the file `key`."""
        fd = self._files[key]
        return os.pread(fd, os.fstat(fd).st_size, 0)

    def write(self, key: Key, data: bytes) -> None:
        """Keep `data` in a file as `key`."""
        fd = os.memfd_create("shardwise-island", os.MFD_CLOEXEC)
        with os.fdopen(os.dup(fd), "wb") as file:
            file.write(data)
        self.keep(key, fd)

    def copy(self, key: Key) -> int | None:
        """Return a descriptor of the file `key` that the caller closes, None if it is not here.
        Any thread may call it."""
        with self._lock:
            fd = self._files.get(key)
            return None if fd is None else os.dup(fd)

    def settle(self, deliveries: Sequence[Delivery], dropped: Sequence[Key]) -> None:
        """Deliver messages and files to ranks, and then drop the files `dropped`."""
        for delivery in deliveries:
            self._send(delivery)
        with self._lock:
            for key in dropped:
                if (fd := self._files.pop(key, None)) is not None:
                    os.close(fd)

    def _hear(self, rank: int, link: socket.socket) -> None:
        """Take one message of `rank`."""
        # An event earlier in this turn of the loop may have closed the link.
        if self._links.get(rank) is not link:
            return
        try:
            data, fds, flags, _ = socket.recv_fds(link, LONGEST, 1)
        except BlockingIOError:
            return
        except ConnectionError:
            data, fds, flags = b"", [], 0
        if flags & socket.MSG_CTRUNC:
            raise LaunchError(f"What rank {rank} brings cannot be opened: {TOO_MANY}")
        if not data:  # the rank has ended, or is about to; its files stay valid
            self.shut([rank])
            return
        message = json.loads(data)
        if "back" in message:
            self._told.asks_back(rank)
        elif "who" in message:
            self._told.asks_who(rank)
        else:
            self._take(rank, message, fds[0])

    def _take(self, rank: int, message: dict[str, Any], fd: int) -> None:
        """Keep the file of a rank, and report it."""
        what = Contribution(
            rank=rank,
            number=next(self._numbers),
            size=os.fstat(fd).st_size,
            label=message["come"],
            alone=message["alone"],
            resumes=message["resumes"],
        )
        self.keep(what.key, fd)
        self._told.came(what)

    def _send(self, delivery: Delivery) -> None:
        link = self._links.get(delivery.rank)
        if link is None:
            return
        fds = [self._files[key] for key in delivery.keys]
        try:
            socket.send_fds(link, [json.dumps(delivery.words).encode()], fds)
        except ConnectionError:  # it has just ended
            return
        except OSError as error:
            raise LaunchError(
                f"What islands bring cannot be passed on to rank {delivery.rank} "
                f"({error.strerror}): {TOO_MANY}"
            ) from None
