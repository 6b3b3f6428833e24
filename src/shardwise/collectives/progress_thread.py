"""A thread that waits for Gloo's messages, or starts them, so that nobody else has to.

Gloo moves bytes in threads of its own but tells of their arrival only to who waits. A rank that
waited itself would keep back what others need of it meanwhile, and ranks could wait for each other
in a circle. So the courier waits, goes on with what comes next, and rings a bell that wakes the
rank. To start a message takes time as well; a second thread does so in the same way.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection
from queue import SimpleQueue

from shardwise.collectives.socket_mesh import MeshPoll
from shardwise.errors import CollectiveError
from shardwise.watch.waits import Waits

PATIENCE = 2.0
"""Seconds that the last messages get to come to an end when their group has been left."""


class PendingWork:
    """Messages on their way; once `is_over`, all have come, or `error` says why not.

    `missing` tells for which ranks the courier waits now.
    """

    def __init__(self, missing: Callable[[], Collection[int]]) -> None:
        self._over = threading.Event()
        self.missing = missing
        self.error: Exception | None = None

    @property
    def is_over(self) -> bool:
        return self._over.is_set()

    def end(self, error: Exception | None) -> None:
        """Let it be over."""
        self.error = error
        self._over.set()

    def wait(self) -> None:
        """Return when it is over; raises its error."""
        self._over.wait()
        if self.error is not None:
            raise self.error


class ProgressThread:
    """Makes trips one after the other, and wakes who looks at `watch`, where one is given."""

    def __init__(
        self, waits: Waits, watch: MeshPoll | None = None, name: str = "shardwise-progress"
    ) -> None:
        self._waits = waits
        self._name = name
        self._watch = watch
        self._bell = -1
        if watch is not None:
            self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            watch.hear(self._bell)
        self._begun: SimpleQueue[tuple[PendingWork, Callable[[], None]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._dismissed = False
        self._door = threading.Lock()

    def follow(self, wait: Callable[[], None]) -> PendingWork:
        """A pending that is over when `wait` has returned, or raised.

        Raises CollectiveError when the thread has ended, or will: nobody would make the pending.
        """
        pending = PendingWork(self._missing)
        with self._door:
            self.refuse_if_dismissed()
            if self._thread is None:
                # A daemon, since the end of a process must not wait for a rank that never comes.
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._begun.put((pending, wait))
        return pending

    def refuse_if_dismissed(self) -> None:
        """Raise CollectiveError when no pending can begin any more."""
        if self._dismissed:
            raise CollectiveError(
                "This group of ranks has been closed here, as at the end of a run: this rank can "
                "send and receive nothing in it any more."
            )

    def dismiss(self) -> None:
        """Let the thread end after the trips that it has been given."""
        with self._door:
            self._dismissed = True
            self._begun.put(None)

    def close(self) -> None:
        """End the thread. Trips that are under way have been cut off, or end by themselves."""
        self.dismiss()
        if self._thread is not None:
            self._thread.join(PATIENCE)
        if self._watch is not None:
            self._watch.leave(self._bell)
            self._watch = None
            if self._thread is None or not self._thread.is_alive():
                os.close(self._bell)

    def _missing(self) -> Collection[int]:
        wait = self._waits.of(self._thread.ident if self._thread else None)
        return wait.missing() if wait else ()

    def _run(self) -> None:
        with self._waits.helping():
            while self._make_trip():
                pass

    def _make_trip(self) -> bool:
        """Make the next one, of which nothing is kept; False when there will be no more."""
        begun = self._begun.get()
        if begun is None:
            return False
        pending, wait = begun
        error = None
        try:
            wait()
        except Exception as raised:  # raised again where the rank waits
            error = raised
        del begun, wait  # whoever goes on now may be the last to hold the tensors
        pending.end(error)
        if self._watch is not None:
            os.eventfd_write(self._bell, 1)
        return True
