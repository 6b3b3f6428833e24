"""Tracks the waits of this process: which thread waits, in which collective, and for which ranks.

A thread records its wait before it sleeps. Other threads read the record only if the wait takes
long.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager

from shardwise.timeline import recorder

Missing = Callable[[], Collection[int]]
"""Returns the ranks that a wait is currently waiting for."""

Compare = Callable[[], None]
"""Checks whether the missing ranks are in the same collective, and ends the wait if they are not.
None if the transport checks that itself."""


def _nobody() -> tuple[int, ...]:
    return ()


class Wait:
    """Context manager for a wait in this thread.

    `call` is the name and number of the collective, and `since` the start of the wait, in seconds
    on the monotonic clock.
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
        # Waits can be nested, such as a collective in a barrier. The outer one is restored on exit.
        self._outer = opened.get(self._thread)
        opened[self._thread] = self
        # Record the missing ranks at the start: when the wait ends, none is missing any more.
        if recorder.active is not None:
            self._whom = tuple(sorted(self.missing()))

    def __exit__(self, *_: object) -> None:
        # Restore the outer wait, which is still open.
        if self._outer is None:
            del self._waits._open[self._thread]
            if self._thread not in self._waits._helpers and self._thread not in self._waits._beside:
                self._waits.seconds += time.monotonic() - self.since
        else:
            self._waits._open[self._thread] = self._outer
        recording = recorder.active
        if recording is not None and self._thread not in self._waits._helpers:
            beside = self._thread in self._waits._beside
            recording.waited(self.call, self.since, self._whom, beside)
        # The watchdog may still hold this wait, but must not keep the call's buffers alive.
        self.missing, self.compare, self._outer = _nobody, None, None


class Waits:
    """The open waits of this process."""

    def __init__(self) -> None:
        self.seconds = 0.0
        """Total time in which this process could not compute, because it waited for others."""
        self._open: dict[int, Wait] = {}
        self._helpers: set[int] = set()
        self._beside: set[int] = set()

    def noted(self, call: str, missing: Missing, compare: Compare | None = None) -> Wait:
        """Return a context manager that records a wait in this thread."""
        return Wait(self, call, missing, compare)

    def all(self) -> list[Wait]:
        return list(self._open.values())

    def helping(self) -> AbstractContextManager[None]:
        """Context manager for a helper thread, whose waits do not block the rank."""
        return _among(self._helpers)

    def beside(self) -> AbstractContextManager[None]:
        """Context manager for a thread that waits while another thread computes.

        These waits count as blocking the rank, because the other thread will need their results.
        A timeline does not show them in the other thread's row.
        """
        return _among(self._beside)

    def of(self, thread: int | None) -> Wait | None:
        """Return the open wait of `thread`, or None if it is not waiting."""
        return None if thread is None else self._open.get(thread)

    def longest(self) -> Wait | None:
        """Return the oldest open wait that blocks this rank, or None."""
        # `list` copies atomically, even while other threads open and close waits.
        waits = [wait for thread, wait in list(self._open.items()) if thread not in self._helpers]
        return min(waits, key=lambda wait: wait.since, default=None)


@contextmanager
def _among(threads: set[int]) -> Iterator[None]:
    thread = threading.get_ident()
    threads.add(thread)
    try:
        yield
    finally:
        threads.discard(thread)
