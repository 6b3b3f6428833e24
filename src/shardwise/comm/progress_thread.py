"""Threads that start Gloo's messages or wait for them, so that no rank blocks others.

Gloo transfers data in its own threads, but reports arrivals only to a thread that waits. While the
training thread waited, it could not serve the other ranks, and ranks could deadlock. So the
progress thread waits, continues the call, and signals an eventfd that wakes the training thread.
Starting a message takes time too, so a second thread, the send thread, starts messages.
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
"""Seconds that `close` waits for the last messages of a group."""


class PendingWork:
    """A function that a `ProgressThread` runs or will run.

    Once `is_over`, the function has returned, or has failed if `error` is set. `missing` returns
    the ranks that the thread is currently waiting for.
    """

    def __init__(self, missing: Callable[[], Collection[int]]) -> None:
        self._over = threading.Event()
        self.missing = missing
        self.error: Exception | None = None

    @property
    def is_over(self) -> bool:
        return self._over.is_set()

    def end(self, error: Exception | None) -> None:
        """Mark the work as completed, or as failed if `error` is not None."""
        self.error = error
        self._over.set()

    def wait(self) -> None:
        """Block until the work is over. If it failed, raise its exception."""
        self._over.wait()
        if self.error is not None:
            raise self.error


class ProgressThread:
    """A thread that runs functions in sequence, and wakes the thread waiting on `poll`, if any."""

    def __init__(
        self, waits: Waits, poll: MeshPoll | None = None, name: str = "shardwise-progress"
    ) -> None:
        self._waits = waits
        self._name = name
        self._poll = poll
        self._bell = -1
        if poll is not None:
            self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            poll.add_bell(self._bell)
        self._begun: SimpleQueue[tuple[PendingWork, Callable[[], None]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._dismissed = False
        self._lock = threading.Lock()

    def follow(self, wait: Callable[[], None]) -> PendingWork:
        """Queue the function `wait`. The returned work is complete once `wait` returns or raises.

        Raises CollectiveError if the thread has stopped or is stopping, because the work would
        never run.
        """

        def missing() -> Collection[int]:
            wait = self._waits.of(self._thread.ident if self._thread else None)
            return wait.missing() if wait else ()

        pending = PendingWork(missing)
        # Without the lock, work could be queued after the stop marker and never run.
        with self._lock:
            self.refuse_if_dismissed()
            if self._thread is None:
                # A daemon thread, so that the process can exit even if a rank never sends.
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._begun.put((pending, wait))
        return pending

    def refuse_if_dismissed(self) -> None:
        """Raise CollectiveError if the thread no longer accepts work."""
        if self._dismissed:
            raise CollectiveError(
                "This rank has already closed its connections to the other ranks, as it does at "
                "the end of a run. Make all calls before the run ends."
            )

    def dismiss(self) -> None:
        """Let the thread stop once it has run the queued work."""
        with self._lock:
            self._dismissed = True
            self._begun.put(None)

    def close(self) -> None:
        """Stop the thread. Pending work must be cancelled or about to finish."""
        self.dismiss()
        if self._thread is not None:
            self._thread.join(PATIENCE)
        if self._poll is not None:
            self._poll.leave(self._bell)
            self._poll = None
            # If the thread still runs, keep the descriptor open: its number could be reused, and
            # the thread would signal a different file.
            if self._thread is None or not self._thread.is_alive():
                os.close(self._bell)

    def _run(self) -> None:
        with self._waits.helping():
            while self._do_next():
                pass

    def _do_next(self) -> bool:
        """Run the next queued function, without keeping a reference to it.

        Returns False if there is none left and the thread should stop.
        """
        begun = self._begun.get()
        if begun is None:
            return False
        pending, wait = begun
        error = None
        try:
            wait()
        except Exception as raised:  # `PendingWork.wait` re-raises it
            error = raised
        del begun, wait  # before `end`, because they hold tensors that the rank may want freed
        pending.end(error)
        if self._poll is not None:
            os.eventfd_write(self._bell, 1)
        return True
