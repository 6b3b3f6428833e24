"""Notes which thread of this process waits, in which collective and for which ranks.

A wait is noted by who is about to sleep, and looked at by others only when it has become long.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager

from shardwise.timeline import recorder

Missing = Callable[[], Collection[int]]
"""The ranks that are waited for at the moment."""

Compare = Callable[[], None]
"""Looks whether the ranks that are waited for are in the same collective, and ends the wait where
they are not; None where the transport sees to that itself."""


def _nobody() -> tuple[int, ...]:
    return ()


class Wait:
    """A context in which this thread waits.

    `call` is the collective by name and number, `since` in seconds of the monotonic clock.
    """

    __slots__ = ("_outer", "_thread", "_waits", "_whom", "call", "compare", "missing", "since")

    def __init__(self, waits: Waits, call: str, missing: Missing, compare: Compare | None) -> None:
        self.call = call
        self.missing = missing
        self.compare = compare
        self._waits = waits
        self._whom: tuple[int, ...] = ()

    def __enter__(self) -> None:
        self.since = time.monotonic()
        self._thread = threading.get_ident()
        opened = self._waits._open
        self._outer = opened.get(self._thread)
        opened[self._thread] = self
        if recorder.active is not None:
            self._whom = tuple(sorted(self.missing()))

    def __exit__(self, *_: object) -> None:
        if self._outer is None:
            del self._waits._open[self._thread]
        else:
            self._waits._open[self._thread] = self._outer
        recording = recorder.active
        if recording is not None and self._thread not in self._waits._helpers:
            beside = self._thread in self._waits._beside
            recording.waited(self.call, self.since, self._whom, beside)
        # Whoever still looks at this wait must not keep alive what it was for.
        self.missing, self.compare, self._outer = _nobody, None, None


class Waits:
    """The open waits of this process."""

    def __init__(self) -> None:
        self._open: dict[int, Wait] = {}
        self._helpers: set[int] = set()
        self._beside: set[int] = set()

    def noted(self, call: str, missing: Missing, compare: Compare | None = None) -> Wait:
        """A context in which this thread waits."""
        return Wait(self, call, missing, compare)

    def all(self) -> list[Wait]:
        """Those of all threads."""
        return list(self._open.values())

    def helping(self) -> AbstractContextManager[None]:
        """This thread waits for others of this process, which may be busy meanwhile."""
        return _among(self._helpers)

    def beside(self) -> AbstractContextManager[None]:
        """This thread waits in place of the one that computes, which goes on until it needs what
        comes: its waits are of the rank, and not in that one's row of a timeline."""
        return _among(self._beside)

    def of(self, thread: int | None) -> Wait | None:
        """What a thread waits in."""
        return None if thread is None else self._open.get(thread)

    def longest(self) -> Wait | None:
        """The oldest wait that keeps this rank from going on."""
        found = [wait for thread, wait in list(self._open.items()) if thread not in self._helpers]
        return min(found, key=lambda wait: wait.since, default=None)


@contextmanager
def _among(threads: set[int]) -> Iterator[None]:
    thread = threading.get_ident()
    threads.add(thread)
    try:
        yield
    finally:
        threads.discard(thread)
