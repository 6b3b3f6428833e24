"""Who waits for whom in this process, by thread.

A wait is noted by who is about to sleep, and looked at by others only when it has become long.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

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

    __slots__ = ("_open", "_outer", "_thread", "call", "compare", "missing", "since")

    def __init__(
        self, waits: dict[int, Wait], call: str, missing: Missing, compare: Compare | None
    ) -> None:
        self.call = call
        self.missing = missing
        self.compare = compare
        self._open = waits

    def __enter__(self) -> None:
        self.since = time.monotonic()
        self._thread = threading.get_ident()
        self._outer = self._open.get(self._thread)
        self._open[self._thread] = self

    def __exit__(self, *_: object) -> None:
        if self._outer is None:
            del self._open[self._thread]
        else:
            self._open[self._thread] = self._outer
        # Whoever still looks at this wait must not keep alive what it was for.
        self.missing, self.compare, self._outer = _nobody, None, None


class Waits:
    """The open waits of this process."""

    def __init__(self) -> None:
        self._open: dict[int, Wait] = {}
        self._helpers: set[int] = set()

    def noted(self, call: str, missing: Missing, compare: Compare | None = None) -> Wait:
        """A context in which this thread waits."""
        return Wait(self._open, call, missing, compare)

    def all(self) -> list[Wait]:
        """Those of all threads."""
        return list(self._open.values())

    @contextmanager
    def helping(self) -> Iterator[None]:
        """This thread waits for others of this process, which may be busy meanwhile."""
        thread = threading.get_ident()
        self._helpers.add(thread)
        try:
            yield
        finally:
            self._helpers.discard(thread)

    def of(self, thread: int | None) -> Wait | None:
        """What a thread waits in."""
        return None if thread is None else self._open.get(thread)

    def longest(self) -> Wait | None:
        """The oldest wait that keeps this rank from going on."""
        found = [wait for thread, wait in list(self._open.items()) if thread not in self._helpers]
        return min(found, key=lambda wait: wait.since, default=None)
