"""IslandLink is a rank's link to the launcher, by which elastic islands exchange what they have.

    "I am here, with this"  ─▶  launcher: all are here  ─▶  who took part, and what they brought

Whatever is brought lies in an anonymous file in memory, whose descriptor travels; on several hosts
the agent of the rank's host stands between. See net/island_membership.py for who takes part.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

from shardwise.errors import CheckpointNotWritten, CollectiveError, UsageError
from shardwise.net.island_desk import LONGEST, TOO_MANY
from shardwise.net.island_membership import admission
from shardwise.net.island_place import IslandPlace
from shardwise.watch.wait_graph import named

PATIENCE = 2
"""How many time-outs a rank waits for other islands: within one, an island that hangs should have
ended itself."""

WHILE_IT_LOADS = 10
"""How many times as long for one that is back, and may load a large checkpoint."""

LAST = 10.0
"""Seconds beyond that in which the launcher may say who is missing."""

_opened: WeakSet[socket.socket] = WeakSet()

Bytes = bytes | bytearray | memoryview


class IslandsChanged(CheckpointNotWritten):
    """An island has ended, or is back, in the middle of what takes several exchanges."""


class IslandLink:
    """The link of a rank at `place`; `timeout` and `warn_after` are seconds of a wait.

    `members` are the islands that take part, of which this one alone is known while it is
    `outside`; `waiting` those that ask to be let in. `changed` is called when members have.
    """

    def __init__(self, place: IslandPlace, rank: int, timeout: float, warn_after: float) -> None:
        self.place = place
        self.outside = place.returns
        self.members: tuple[int, ...] = tuple(range(place.count))
        if self.outside:
            self.members = (place.island,)
        self.waiting: tuple[int, ...] = ()
        self.resumes = False
        """Whether the script goes on from a checkpoint when it is started again."""
        self.changed: Callable[[], None] = _nothing
        self._rank = rank
        self._limit, self._warn_after = PATIENCE * timeout, min(warn_after, timeout)
        self._steady: tuple[int, ...] | None = None
        self._socket = socket.socket(fileno=place.fd)
        self._socket.set_inheritable(False)
        _opened.add(self._socket)

    @property
    def index(self) -> int:
        """The place of this island among those that take part."""
        return self.members.index(self.place.island)

    # -- exchanges ------------------------------------------------------------------------

    def exchange(
        self, label: str, mine: Bytes, *, alone: bool = False
    ) -> tuple[tuple[int, ...], list[Bytes]]:
        """Bring `mine`, and return which islands took part in this exchange, and what the rank of
        this place in each has brought, in their order.

        All ranks of all islands come to it; with `alone` those of this place. Raises
        CollectiveError where one does not come, UsageError where one comes to an exchange of
        another `label`.
        """
        if self.outside:
            return self.members, [mine]
        answer, brought = self._come(label, mine, alone=alone)
        islands, theirs = tuple(answer["islands"]), iter(brought)
        rows = [mine if island == self.place.island else next(theirs) for island in islands]
        self._take(answer)
        if self._steady is not None and islands != self._steady:
            raise IslandsChanged(f"{_named(self._steady)} became {_named(islands)}.")
        return islands, rows

    def _come(self, label: str, mine: Bytes, *, alone: bool) -> tuple[dict[str, Any], list[Bytes]]:
        fd = os.memfd_create("shardwise-island", os.MFD_CLOEXEC)
        try:
            _write(fd, mine)
            message = json.dumps({"come": label, "alone": alone, "resumes": self.resumes}).encode()
            self._guarded(lambda: socket.send_fds(self._socket, [message], [fd]))
        finally:
            os.close(fd)
        return self._answer(label)

    def _answer(self, label: str) -> tuple[dict[str, Any], list[Bytes]]:
        """What the launcher says once all have come. Raises as `exchange`."""
        begun, deadlines = time.monotonic(), [self._warn_after, self._limit, self._limit + LAST]
        longest = WHILE_IT_LOADS * self._limit
        while True:
            received = self._received(deadlines[0] - (time.monotonic() - begun))
            if received is None:
                if len(deadlines) == 1:
                    raise self._late(label, [], self._limit)
                del deadlines[0]
                self._guarded(lambda: self._socket.send(b'{"who": true}'))
                continue
            words, brought = received
            if "islands" in words:
                return words, brought
            if "refused" in words:
                raise _apart(words["refused"])
            if words["missing"] and len(deadlines) == 1:
                if not words["loads"] or deadlines[0] > longest:
                    raise self._late(label, words["missing"], deadlines[0] - LAST)
                deadlines = [longest, longest + LAST]
            self._warn(label, words["missing"])

    def _received(self, seconds: float) -> tuple[dict[str, Any], list[Bytes]] | None:
        """The next message within `seconds`, and what came with it."""
        self._socket.settimeout(max(0.001, seconds))
        try:
            data, fds, flags, _ = self._guarded(
                lambda: socket.recv_fds(self._socket, LONGEST, self.place.count)
            )
        except TimeoutError:
            return None
        if flags & socket.MSG_CTRUNC:
            for fd in fds:
                os.close(fd)
            raise CollectiveError(f"Rank {self._rank} cannot open what islands bring: {TOO_MANY}")
        if not data:
            raise self._left_out()
        return json.loads(data), [_read(fd) for fd in fds]

    def _guarded(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except ConnectionError:
            raise self._left_out() from None
        except TimeoutError:
            raise
        except OSError as error:
            raise CollectiveError(
                f"Rank {self._rank} cannot reach the launcher ({error.strerror}): {TOO_MANY}"
            ) from None

    def _left_out(self) -> CollectiveError:
        ranks = range(self.place.first, self.place.first + self.place.size)
        return CollectiveError(
            f"Island {self.place.island} is left out by the launcher, since one of its ranks has "
            "ended: the others go on without it."
        ).blaming(rank for rank in ranks if rank != self._rank)

    def _warn(self, label: str, missing: Sequence[int]) -> None:
        """Let the first rank of an island say for whom it waits."""
        if missing and self._rank == self.place.first:
            print(
                f"shardwise: island {self.place.island} has waited {self._warn_after:g} s in "
                f"{label} for {named(missing)}.",
                file=sys.stderr,
                flush=True,
            )

    def _late(self, label: str, missing: Sequence[int], waited: float) -> CollectiveError:
        whom = f"{named(missing)} of another island" if missing else "the launcher"
        return CollectiveError(
            f"Rank {self._rank} has waited {waited:g} s in {label} for {whom}, which did not "
            "come. All islands must make the same calls; --timeout sets half of how long to wait."
        ).blaming(missing)

    def _take(self, answer: dict[str, Any]) -> None:
        """Know who takes part from now on."""
        before, self.members = self.members, tuple(answer["members"])
        self.waiting = tuple(answer["waiting"])
        if before != self.members:
            self.changed()

    @property
    def is_steady(self) -> bool:
        """Whether a block of `steady` is under way."""
        return self._steady is not None

    @contextmanager
    def steady(self) -> Iterator[None]:
        """Inside the block an exchange raises IslandsChanged, on all that take part alike, where
        others take part in it than when the block began."""
        before, self._steady = self._steady, self._steady or self.members
        try:
            yield
        finally:
            self._steady = before

    # -- returning --------------------------------------------------------------------------

    def admit(self, islands: Sequence[int], step: int, about: bytes) -> None:
        """Let `islands`, which wait, take part after `step`, from the next exchange on; they get
        `about`."""
        self.exchange(admission(islands, step), about)

    def ask_back(self) -> tuple[dict[str, Any], bytes]:
        """Wait until the others admit this island, for as long as that takes; what they say, for
        `enter`, and what it gets from them."""
        self._guarded(lambda: self._socket.send(b'{"back": true}'))
        while True:
            received = self._received(self._warn_after)
            if received is not None and "islands" in received[0]:
                return received[0], bytes(received[1][0])

    def enter(self, answer: dict[str, Any]) -> None:
        """Take part from now on."""
        self.outside = False
        self._take(answer)

    def close(self) -> None:
        """Close the link."""
        self._socket.close()


def _nothing() -> None:
    return


def _write(fd: int, data: Bytes) -> None:
    left = memoryview(data).cast("B") if len(data) else memoryview(b"")
    while left:
        left = left[os.write(fd, left) :]


def _read(fd: int) -> bytearray:
    """What lies in the file `fd`, which is closed."""
    with os.fdopen(fd, "rb", buffering=0) as file:
        data = bytearray(os.fstat(fd).st_size)
        view, place = memoryview(data), 0
        while place < len(data):
            place += os.preadv(fd, [view[place:]], place)
        del file
    return data


def _named(islands: Sequence[int]) -> str:
    return f"island{'s' * (len(islands) > 1)} {', '.join(map(str, islands))}"


def _apart(ranks: Sequence[tuple[int, str]]) -> UsageError:
    (first, label), (other, theirs) = ranks
    return UsageError(
        f"Rank {first} is in {label}, and rank {other} in {theirs}: all islands must make the same "
        "calls in the same order. An island that is back goes on after engine.resume(folder); call "
        "nothing of all ranks between that and the loop."
    )


def _in_forked_child() -> None:
    """A forked DataLoader worker must not hold our end open."""
    for opened in list(_opened):
        if (fd := opened.detach()) >= 0:
            os.close(fd)


os.register_at_fork(after_in_child=_in_forked_child)
