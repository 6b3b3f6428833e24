"""Connects a rank to the launcher, which exchanges data between elastic islands.

    contribution  ─▶  launcher: all ranks have contributed  ─▶  who took part, and their files

A rank writes its data to an anonymous in-memory file, and sends the descriptor to the launcher. On
several hosts, it sends the descriptor to its host's agent instead. membership.py decides which
islands take part.
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
from shardwise.islands.elastic.broker import LONGEST, TOO_MANY
from shardwise.islands.elastic.membership import IslandPlace, admission
from shardwise.watch.wait_graph import named

PATIENCE = 2
"""A rank waits for other islands for this multiple of `--timeout`.

A hanging island's own watchdog should have aborted it after a single timeout.
"""

WHILE_IT_LOADS = 10
"""Further multiple for a returning island, which may be loading a large checkpoint."""

LAST = 10.0
"""Additional seconds for the launcher to report the missing ranks."""

_opened: WeakSet[socket.socket] = WeakSet()

Bytes = bytes | bytearray | memoryview


class IslandsChanged(CheckpointNotWritten):
    """Raised if the set of islands changes during an operation that needs several exchanges."""


class IslandLink:
    """A rank's link to the launcher.

    Args:
        place: The rank's island, and its socket to the launcher.
        rank: The rank.
        timeout: The value of `--timeout`, in seconds.
        warn_after: Seconds after which the first rank of the island prints the missing ranks.

    Attributes:
        outside: True while the other islands train without this one.
        members: The participating islands. While `outside` is True, contains only this island.
        waiting: The islands that are waiting for admission.
        changed: Called when `members` has changed.
    """

    def __init__(self, place: IslandPlace, rank: int, timeout: float, warn_after: float) -> None:
        self.place = place
        self.outside = place.returns
        self.members: tuple[int, ...] = tuple(range(place.count))
        if self.outside:
            self.members = (place.island,)
        self.waiting: tuple[int, ...] = ()
        self.resumes = False
        """True if the script can resume from a checkpoint after a restart."""
        self.changed: Callable[[], None] = lambda: None
        self._rank = rank
        self._limit, self._warn_after = PATIENCE * timeout, min(warn_after, timeout)
        self._steady: tuple[int, ...] | None = None
        self._socket = socket.socket(fileno=place.fd)
        # Otherwise programs started by the rank would hold the link open after the rank has exited.
        self._socket.set_inheritable(False)
        _opened.add(self._socket)

    @property
    def index(self) -> int:
        """The index of this island in `members`."""
        return self.members.index(self.place.island)

    # -- exchanges ------------------------------------------------------------------------

    def exchange(
        self, label: str, mine: Bytes, *, alone: bool = False
    ) -> tuple[tuple[int, ...], list[Bytes]]:
        """Send `mine` to the other islands, and receive their data.

        All ranks of all islands must call this method. If `alone` is true, only the peers (the
        ranks with the same index) call it. Returns the islands that took part, and their peers'
        data in the order of the islands. Raises CollectiveError if a rank does not make this call
        in time, and UsageError if a rank calls it with a different `label`.
        """
        if self.outside:
            # Until the other islands admit this one, it exchanges only with itself.
            return self.members, [mine]
        answer, files = self._contribute(label, mine, alone=alone)
        islands, other_files = tuple(answer["islands"]), iter(files)
        rows = [mine if island == self.place.island else next(other_files) for island in islands]
        self._update_members(answer)
        # Raise only after the update. All participating ranks raise here, and repeat the operation
        # with the same members.
        if self._steady is not None and islands != self._steady:
            raise IslandsChanged(f"{_named(self._steady)} became {_named(islands)}.")
        return islands, rows

    def _contribute(
        self, label: str, mine: Bytes, *, alone: bool
    ) -> tuple[dict[str, Any], list[Bytes]]:
        # Use a file, because messages on the socket are limited to LONGEST bytes. The launcher
        # passes on the file's descriptor, not its content.
        fd = os.memfd_create("shardwise-island", os.MFD_CLOEXEC)
        try:
            remaining = memoryview(mine).cast("B") if len(mine) else memoryview(b"")
            while remaining:
                remaining = remaining[os.write(fd, remaining) :]
            message = json.dumps({"label": label, "alone": alone, "resumes": self.resumes}).encode()
            self._guarded(lambda: socket.send_fds(self._socket, [message], [fd]))
        finally:
            os.close(fd)  # the message holds a duplicate
        return self._wait_for_answer(label)

    def _wait_for_answer(self, label: str) -> tuple[dict[str, Any], list[Bytes]]:
        """Wait for the launcher's answer, which it sends once all ranks have contributed.

        Raises the same errors as `exchange`.
        """
        # The deadlines, in order: print the missing ranks, give up, stop waiting for the launcher's
        # last answer.
        begun, deadlines = time.monotonic(), [self._warn_after, self._limit, self._limit + LAST]
        longest = WHILE_IT_LOADS * self._limit
        while True:
            received = self._receive(deadlines[0] - (time.monotonic() - begun))
            if received is None:
                if len(deadlines) == 1:
                    raise self._late_error(label, [], self._limit)
                del deadlines[0]
                self._guarded(lambda: self._socket.send(b'{"who": true}'))
                continue
            message, files = received
            if "islands" in message:
                return message, files
            if "refused" in message:
                raise _different_calls_error(message["refused"])
            if message["missing"] and len(deadlines) == 1:
                if not message["loads"] or deadlines[0] > longest:
                    raise self._late_error(label, message["missing"], deadlines[0] - LAST)
                deadlines = [longest, longest + LAST]
            self._warn(label, message["missing"])

    def _receive(self, seconds: float) -> tuple[dict[str, Any], list[Bytes]] | None:
        """Return the next message and the content of its files, or None after `seconds` seconds."""
        # A timeout of 0 would make the socket non-blocking.
        self._socket.settimeout(max(0.001, seconds))
        try:
            data, fds, flags, _ = self._guarded(
                lambda: socket.recv_fds(self._socket, LONGEST, self.place.count)
            )
        except TimeoutError:
            return None
        # The kernel has dropped descriptors, because this process has reached its limit of open
        # files.
        if flags & socket.MSG_CTRUNC:
            for fd in fds:
                os.close(fd)
            raise CollectiveError(f"Rank {self._rank} cannot receive islands' files: {TOO_MANY}")
        if not data:
            raise self._left_out_error()
        return json.loads(data), [_read(fd) for fd in fds]

    def _guarded(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except ConnectionError:
            raise self._left_out_error() from None
        except TimeoutError:
            raise
        except OSError as error:
            raise CollectiveError(
                f"Rank {self._rank} cannot reach the launcher ({error.strerror}): {TOO_MANY}"
            ) from None

    def _left_out_error(self) -> CollectiveError:
        ranks = range(self.place.first, self.place.first + self.place.size)
        return CollectiveError(
            f"The launcher has removed island {self.place.island}, because one of its ranks has "
            "ended. The other islands continue without it."
        ).blaming(rank for rank in ranks if rank != self._rank)

    def _warn(self, label: str, missing: Sequence[int]) -> None:
        """Print the ranks that this island is waiting for, if this rank is the island's first."""
        if missing and self._rank == self.place.first:
            print(
                f"shardwise: island {self.place.island} has waited {self._warn_after:g} s in "
                f"{label} for {named(missing)}.",
                file=sys.stderr,
                flush=True,
            )

    def _late_error(self, label: str, missing: Sequence[int], waited: float) -> CollectiveError:
        whom = f"{named(missing)} of another island" if missing else "the launcher"
        return CollectiveError(
            f"Rank {self._rank} has waited {waited:g} s in {label} for {whom}, which did not "
            "arrive. All islands must make the same calls. --timeout sets half of this wait."
        ).blaming(missing)

    def _update_members(self, answer: dict[str, Any]) -> None:
        """Store the participating and waiting islands from the launcher's `answer`."""
        before, self.members = self.members, tuple(answer["members"])
        self.waiting = tuple(answer["waiting"])
        if before != self.members:
            self.changed()

    @property
    def is_steady(self) -> bool:
        """True inside a `steady` block."""
        return self._steady is not None

    @contextmanager
    def steady(self) -> Iterator[None]:
        """Return a context manager in which `exchange` raises IslandsChanged if `members` changes.

        All participating ranks raise it. `members` is compared with its value at the start of the
        outermost block.
        """
        outer, self._steady = self._steady, self._steady or self.members
        try:
            yield
        finally:
            self._steady = outer

    # -- returning --------------------------------------------------------------------------

    def admit(self, islands: Sequence[int], step: int, about: bytes) -> None:
        """Admit the waiting islands `islands` after step `step`, and send them `about`.

        They take part in exchanges from the next one on.
        """
        self.exchange(admission(islands, step), about)

    def wait_for_admission(self) -> tuple[dict[str, Any], bytes]:
        """Wait until the other islands admit this one.

        Returns the launcher's answer, to be passed to `enter`, and the other islands' data.
        """
        # Wait without a limit, because the other islands' next boundary may be many steps away.
        self._guarded(lambda: self._socket.send(b'{"back": true}'))
        while True:
            received = self._receive(self._warn_after)
            if received is not None and "islands" in received[0]:
                return received[0], bytes(received[1][0])

    def enter(self, answer: dict[str, Any]) -> None:
        """Start to take part in exchanges.

        Call this after loading what `wait_for_admission` returned. `answer` is part of that.
        """
        self.outside = False
        self._update_members(answer)

    def close(self) -> None:
        self._socket.close()


def _read(fd: int) -> bytearray:
    """Return the content of the file `fd`, and close it."""
    with os.fdopen(fd, "rb", buffering=0) as file:
        data = bytearray(os.fstat(fd).st_size)
        view, place = memoryview(data), 0
        while place < len(data):
            # Read at explicit offsets, because all descriptors of the file share one position.
            place += os.preadv(fd, [view[place:]], place)
        del file
    return data


def _named(islands: Sequence[int]) -> str:
    return f"island{'s' * (len(islands) > 1)} {', '.join(map(str, islands))}"


def _different_calls_error(ranks: Sequence[tuple[int, str]]) -> UsageError:
    (first, label), (other, other_label) = ranks
    return UsageError(
        f"Rank {first} is in {label}, but rank {other} is in {other_label}. All islands must make "
        "the same calls in the same order. A returning island continues after "
        "engine.resume(folder); make no collective calls between engine.resume and the training "
        "loop."
    )


def _in_forked_child() -> None:
    """Close the links in a forked child.

    If a DataLoader worker held a link open, the launcher would not notice that its rank has exited.
    """
    for opened in list(_opened):
        if (fd := opened.detach()) >= 0:
            os.close(fd)


os.register_at_fork(after_in_child=_in_forked_child)
