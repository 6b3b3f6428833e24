"""Runs Gloo's waits, or starts its messages, in a thread of its own, so that no rank stands still.

Gloo moves bytes in threads of its own but reports their arrival only to who waits. A rank that
waited itself would keep back what others need of it meanwhile, and ranks could wait for each other
in a circle. So this thread waits, goes on with what comes next, and signals an eventfd that wakes
the rank. To start a message takes time as well; a second thread, the send thread, does so in the
same way.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection
from queue import SimpleQueue

from shardwise.comm.socket_mesh import MeshPoll
from shardwise.errors import CollectiveError
from shardwise.watch.waits import Waits

PATIENCE = 2.0
"""Seconds that the last messages get to come to an end when their group has been left."""


class PendingWork:
    """Work of the thread; once `is_over`, it is done, or `error` says why not.

    `missing` gives the ranks that the thread waits for now.
    """

    def __init__(self, missing: Callable[[], Collection[int]]) -> None:
        self._over = threading.Event()
        self.missing = missing
        self.error: Exception | None = None

    @property
    def is_over(self) -> bool:
        return self._over.is_set()

    def end(self, error: Exception | None) -> None:
        """Mark it as over."""
        self.error = error
        self._over.set()

    def wait(self) -> None:
        """Return when it is over; raises its error."""
        self._over.wait()
        if self.error is not None:
            raise self.error


class ProgressThread:
    """Does one piece of work after the other, and wakes who waits on `poll`, where one is given."""

    def __init__(
        self, waits: Waits, poll: MeshPoll | None = None, name: str = "shardwise-progress"
    ) -> None:
        self._waits = waits
        self._name = name
        self._poll = poll
        self._bell = -1
        if poll is not None:
            self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            poll.hear(self._bell)
        self._begun: SimpleQueue[tuple[PendingWork, Callable[[], None]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._dismissed = False
        self._door = threading.Lock()

    def follow(self, wait: Callable[[], None]) -> PendingWork:
        """Queue `wait`; returns work that is over when it has returned, or raised.

        Raises CollectiveError when the thread has ended, or will: nobody would do the work.
        """
        pending = PendingWork(self._missing)
        # Without the lock, work could be queued behind the end and never be done.
        with self._door:
            self.refuse_if_dismissed()
            if self._thread is None:
                # A daemon, since the end of a process must not wait for a rank that never comes.
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._begun.put((pending, wait))
        return pending

    def refuse_if_dismissed(self) -> None:
        """Raise CollectiveError when no work can begin any more."""
        if self._dismissed:
            raise CollectiveError(
                "This group of ranks has been closed here, as at the end of a run: this rank can "
                "send and receive nothing in it any more."
            )

    def dismiss(self) -> None:
        """Let the thread end after the work that it has been given."""
        with self._door:
            self._dismissed = True
            self._begun.put(None)

    def close(self) -> None:
        """End the thread. Work that is under way has been cut off, or ends by itself."""
        self.dismiss()
        if self._thread is not None:
            self._thread.join(PATIENCE)
        if self._poll is not None:
            self._poll.leave(self._bell)
            self._poll = None
            # A thread that lives on would signal a descriptor that is another file's by then.
            if self._thread is None or not self._thread.is_alive():
                os.close(self._bell)

    def _missing(self) -> Collection[int]:
        wait = self._waits.of(self._thread.ident if self._thread else None)
        return wait.missing() if wait else ()

    def _run(self) -> None:
        with self._waits.helping():
            while self._do_next():
                pass

    def _do_next(self) -> bool:
        """Do the next work and keep nothing of it; False when there will be no more."""
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
        if self._poll is not None:
            os.eventfd_write(self._bell, 1)
        return True
