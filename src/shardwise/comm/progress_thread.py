"""A thread that waits for Gloo's messages, or starts them, so that no rank blocks others.

Gloo moves bytes in its own threads, but reports their arrival only to a thread that waits. If the
training thread waited, it would not serve the other ranks meanwhile, and ranks could deadlock. So
this thread waits, continues the call, and signals an eventfd that wakes the training thread.
Starting a message takes time too: a second such thread, the send thread, starts them.
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
    """Work of the thread. Once `is_over`, it is done unless there is an `error`.

    `missing` returns the ranks that the thread currently waits for.
    """

    def __init__(self, missing: Callable[[], Collection[int]]) -> None:
        self._over = threading.Event()
        self.missing = missing
        self.error: Exception | None = None

    @property
    def is_over(self) -> bool:
        return self._over.is_set()

    def end(self, error: Exception | None) -> None:
        """Mark the work as over."""
        self.error = error
        self._over.set()

    def wait(self) -> None:
        """Block until the work is over. Raises its error."""
        self._over.wait()
        if self.error is not None:
            raise self.error


class ProgressThread:
    """Runs pieces of work one after another, and wakes the thread that waits on `poll`, if any."""

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
        """Queue `wait`; the returned work is over when `wait` has returned or raised.

        Raises CollectiveError if the thread has ended or is about to: the call would wait forever.
        """

        def missing() -> Collection[int]:
            wait = self._waits.of(self._thread.ident if self._thread else None)
            return wait.missing() if wait else ()

        pending = PendingWork(missing)
        # Without the lock, work could be queued behind the end and never be done.
        with self._lock:
            self.refuse_if_dismissed()
            if self._thread is None:
                # A daemon thread, so that a process can end although a rank never sends.
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._begun.put((pending, wait))
        return pending

    def refuse_if_dismissed(self) -> None:
        """Raise CollectiveError if the thread accepts no more work."""
        if self._dismissed:
            raise CollectiveError(
                "This rank has closed this group of ranks, as at the end of a run. It can no "
                "longer send or receive in it: make all calls before the run ends."
            )

    def dismiss(self) -> None:
        """End the thread after the queued work."""
        with self._lock:
            self._dismissed = True
            self._begun.put(None)

    def close(self) -> None:
        """End the thread. The caller has cancelled pending work, or it will end soon."""
        self.dismiss()
        if self._thread is not None:
            self._thread.join(PATIENCE)
        if self._poll is not None:
            self._poll.leave(self._bell)
            self._poll = None
            # Keep the descriptor if the thread still runs: it would signal another file later.
            if self._thread is None or not self._thread.is_alive():
                os.close(self._bell)

    def _run(self) -> None:
        with self._waits.helping():
            while self._do_next():
                pass

    def _do_next(self) -> bool:
        """Do the next work, and keep no reference to it. Returns False after the last."""
        begun = self._begun.get()
        if begun is None:
            return False
        pending, wait = begun
        error = None
        try:
            wait()
        except Exception as raised:  # `PendingWork.wait` raises it again
            error = raised
        del begun, wait  # before `end`: they hold tensors that the rank may want freed
        pending.end(error)
        if self._poll is not None:
            os.eventfd_write(self._bell, 1)
        return True
