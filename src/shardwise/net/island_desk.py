"""Serves the links to the ranks of one host whose islands may end: what they bring, what they get.

    rank  ─▶ {"come": label, ...} + a file in memory                  what it brings
    rank  ─▶ {"back": true}                                           it asks to be let in
    rank  ─▶ {"who": true}                                            for whom does it wait?
    rank ◀─  {"islands": [...], "members": [...], ...} + files        what the others have brought

What is exchanged lies in anonymous files in memory: only their descriptors come here, and go on, so
what a rank has brought is there for the others when it has ended since. The sockets have no name,
and no process but the ranks has their other ends.
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
"""What there is to say where a file in memory does not arrive."""

Key = tuple[int, int]
"""The rank that has brought something, and which number that has at the desk of its host."""


@dataclass(frozen=True, kw_only=True)
class Contribution:
    """What a rank brings to the exchange `label`: `size` bytes. `alone`: the exchange is between
    the ranks of equal place in the islands. `resumes`: the rank goes on from a checkpoint when it
    is started again."""

    rank: int
    number: int
    size: int
    label: str
    alone: bool
    resumes: bool

    @property
    def key(self) -> Key:
        """By which it is known on all hosts."""
        return self.rank, self.number


@dataclass(frozen=True, kw_only=True)
class Delivery:
    """`words` for a rank, and with them what is known by `keys`."""

    rank: int
    words: dict[str, Any]
    keys: Sequence[Key] = ()


class Customers(Protocol):
    """Who hears of what ranks bring and ask: the hub, or an agent that passes it on to one."""

    def came(self, what: Contribution) -> None:
        """A rank has come to an exchange, and waits."""

    def asks_back(self, rank: int) -> None:
        """`rank`, of an island that is gone, asks to be let in."""

    def asks_who(self, rank: int) -> None:
        """`rank` asks for whom it waits."""


class IslandDesk:
    """The links to the ranks of this host, in the event loop of `selector`, and the files that
    ranks of all hosts have brought, as far as they are needed here."""

    def __init__(self, selector: selectors.BaseSelector, told: Customers) -> None:
        self._selector = selector
        self._told = told
        self._links: dict[int, socket.socket] = {}
        self._files: dict[Key, int] = {}
        self._lock = Lock()
        """Guards the files: another thread sends them to other hosts."""
        self._numbers = count(1 + secrets.randbits(40))
        """Others than those of an earlier desk of this host, of whose some may still be told."""

    def open(self, rank: int) -> socket.socket:
        """A new link to `rank`; returns the rank's end, which it is to inherit."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        self.shut([rank])
        self._links[rank] = ours
        self._selector.register(ours, selectors.EVENT_READ, partial(self._hear, rank, ours))
        return theirs

    def shut(self, ranks: Sequence[int]) -> None:
        """Close the links to `ranks`, as far as there are any."""
        for rank in ranks:
            if (link := self._links.pop(rank, None)) is not None:
                self._selector.unregister(link)
                link.close()

    def close(self) -> None:
        """Close all links, and forget all that was brought."""
        self.shut(list(self._links))
        self.settle((), list(self._files))

    def keep(self, key: Key, fd: int) -> None:
        """Have what is known by `key`: the file `fd`, which is this desk's from now on."""
        with self._lock:
            self._files[key] = fd

    def read(self, key: Key) -> bytes:
        """What is known by `key`."""
        fd = self._files[key]
        return os.pread(fd, os.fstat(fd).st_size, 0)

    def write(self, key: Key, data: bytes) -> None:
        """Have `data`, known by `key`."""
        fd = os.memfd_create("shardwise-island", os.MFD_CLOEXEC)
        with os.fdopen(os.dup(fd), "wb") as file:
            file.write(data)
        self.keep(key, fd)

    def copy(self, key: Key) -> int | None:
        """A descriptor of the caller's own for what is known by `key`; None where it is not here.
        Any thread may ask."""
        with self._lock:
            fd = self._files.get(key)
            return None if fd is None else os.dup(fd)

    def settle(self, deliveries: Sequence[Delivery], dropped: Sequence[Key]) -> None:
        """Give ranks what is for them, and then forget what is known by the keys `dropped`."""
        for delivery in deliveries:
            self._send(delivery)
        with self._lock:
            for key in dropped:
                if (fd := self._files.pop(key, None)) is not None:
                    os.close(fd)

    def _hear(self, rank: int, link: socket.socket) -> None:
        """Take one message of `rank`."""
        if self._links.get(rank) is not link:  # it was closed in this turn of the loop
            return
        try:
            data, fds, flags, _ = socket.recv_fds(link, LONGEST, 1)
        except BlockingIOError:
            return
        except ConnectionError:
            data, fds, flags = b"", [], 0
        if flags & socket.MSG_CTRUNC:
            raise LaunchError(f"What rank {rank} brings cannot be opened: {TOO_MANY}")
        if not data:  # it has ended, or is about to; what it has brought is as good as before
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
        """Keep what a rank has brought, and tell of it."""
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
