"""Carries the exchanges between elastic islands: the launcher's ends of a socket to each rank.

    rank  ─▶ {"come": label, "alone": false} + a file in memory      what it brings
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
import selectors
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from shardwise.errors import LaunchError
from shardwise.launch.island_membership import Answer, Arrival, Membership

LONGEST = 1 << 16
"""Bytes of a message."""

TOO_MANY = (
    "there are too many open files for so many islands, or as many as `ulimit -n` allows. Raise "
    "that, or take fewer islands."
)
"""What there is to say where a file in memory does not arrive."""


class IslandHub:
    """The launcher's side of all exchanges of `membership`, in its event loop.

    `answered` is called after an exchange, with the numbers of the islands that took part.
    """

    def __init__(
        self,
        membership: Membership,
        selector: selectors.BaseSelector,
        answered: Callable[[Sequence[int]], None],
    ) -> None:
        self.membership = membership
        self._selector = selector
        self._answered = answered
        self._links: dict[int, socket.socket] = {}
        self._brought: dict[int, int] = {}

    def open(self, rank: int) -> socket.socket:
        """A new link to `rank`; returns the rank's end, which it is to inherit."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        self.shut(rank)
        self._links[rank] = ours
        self._selector.register(ours, selectors.EVENT_READ, partial(self._hear, rank, ours))
        return theirs

    def shut(self, rank: int) -> None:
        """Close the link to `rank`, if there is one, and forget what it has brought."""
        self._unlink(rank)
        self._drop(rank)

    def _unlink(self, rank: int) -> None:
        if (link := self._links.pop(rank, None)) is not None:
            self._selector.unregister(link)
            link.close()

    def close(self) -> None:
        """Close all links."""
        for rank in {*self._links, *self._brought}:
            self.shut(rank)

    def lose(self, island: int) -> None:
        """`island` takes part no longer: nobody waits for it, nor is it heard."""
        for rank in self.membership.ranks(island):
            self.shut(rank)
        self._answer(self.membership.lose(island))

    def _drop(self, rank: int) -> None:
        """Forget what `rank` has brought."""
        if (fd := self._brought.pop(rank, None)) is not None:
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
            self._unlink(rank)
            return
        message = json.loads(data)
        if "back" in message:
            self.membership.ask_back(rank)
        elif "who" in message:
            self._send(rank, {"missing": self._missing(rank)}, ())
        else:
            self._drop(rank)
            (self._brought[rank],) = fds
            arrival = Arrival(label=message["come"], alone=message["alone"])
            self._answer(self.membership.arrive(rank, arrival))

    def _missing(self, rank: int) -> list[int]:
        """For whom `rank` waits; nobody where its answer is on the way."""
        with suppress(KeyError):
            return self.membership.missing(rank)
        return []

    def _answer(self, answers: Sequence[Answer]) -> None:
        """Send all answers; what was brought has been passed on then."""
        for answer in answers:
            fds = tuple(self._brought[source] for source in answer.sources)
            self._send(answer.rank, answer.words, fds)
        for answer in answers:
            self._drop(answer.rank)
        for islands in {tuple(answer.words.get("islands", ())) for answer in answers}:
            if islands:
                self._answered(islands)

    def _send(self, rank: int, words: dict[str, object], fds: Sequence[int]) -> None:
        link = self._links.get(rank)
        if link is not None:
            try:
                socket.send_fds(link, [json.dumps(words).encode()], list(fds))
            except ConnectionError:  # it has just ended
                return
            except OSError as error:
                raise LaunchError(
                    f"What islands bring cannot be passed on to rank {rank} ({error.strerror}): "
                    f"{TOO_MANY}"
                ) from None
