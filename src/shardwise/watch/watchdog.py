"""The thread of each rank that minds its long waits: compares, warns, and says it where all read.

a second    ask the ranks that are missing whether they are in the same collective
warn_after  ask a rank to speak for all, rank 0 before others: who waits, who is missing, where
others gone end this process too, if it does not come to know by itself: mpiexec and srun let it be
"""

from __future__ import annotations

import os
import sys
import threading
import time

from shardwise.watch import hang_report
from shardwise.watch.status_server import ANSWER, Lookout
from shardwise.watch.waits import Wait

TICK = 0.5
"""Seconds between two looks."""

COMPARE = 1.0
"""Seconds of a wait until it is compared with what others do; then again after twice as long."""

LATEST = 0.8
"""Of the time that a wait may last; at this point it is warned of in any case."""

OUTLIVE = 20.0
"""Seconds that a process may outlive the ranks that have given up: it cannot go on without."""

SPEAKERS = 8
"""So many ranks are asked to speak, one after the other, until one answers."""


class Sentry:
    """Minds the waits of `lookout`; warns after `warn_after` of the `timeout` seconds that a wait
    may last."""

    def __init__(self, lookout: Lookout, warn_after: float, timeout: float) -> None:
        self._lookout = lookout
        self._warn_after = min(warn_after, LATEST * timeout)
        self._timeout = timeout
        self._ended = threading.Event()
        self._compared: dict[Wait, float] = {}
        self._warned: Wait | None = None
        self._spoke: float | None = None
        self._alone_since: float | None = None
        # A daemon, since the end of a process must not wait for who does not answer.
        self._thread = threading.Thread(target=self._run, name="shardwise-sentry", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._ended.set()
        self._thread.join(ANSWER)

    def _run(self) -> None:
        while not self._ended.wait(min(TICK, self._warn_after / 4)):
            now = time.monotonic()
            waits = self._lookout.waits.all()
            self._compare(waits, now)
            wait = self._lookout.waits.longest()
            if wait is not None and now - wait.since >= self._warn_after:
                self._warn(wait)
            if self._lookout.is_to_speak:
                self._lookout.is_to_speak = False
                self._speak()
            self._end_with_the_others(now)

    def _compare(self, waits: list[Wait], now: float) -> None:
        self._compared = {wait: self._compared.get(wait, COMPARE) for wait in waits}
        for wait, due in self._compared.items():
            compare = wait.compare  # gone once the wait has ended
            if compare is not None and now - wait.since >= due:
                self._compared[wait] = 2 * due
                compare()

    def _warn(self, wait: Wait) -> None:
        """Let one rank speak for all, once for each wait: the first that answers."""
        if wait is self._warned:
            return
        self._warned = wait
        for rank in range(min(self._lookout.size, SPEAKERS)):
            if self._lookout.let_speak(rank):
                return

    def _speak(self) -> None:
        """Say who waits for whom, once for all that have asked for it."""
        now = time.monotonic()
        if self._spoke is not None and now - self._spoke < self._warn_after / 2:
            return
        self._spoke = now
        found = self._lookout.ask(range(self._lookout.size), stack=True)
        text = hang_report.words(found, self._timeout)
        if text and sys.__stderr__ is not None:
            sys.__stderr__.write(text)
            sys.__stderr__.flush()

    def _end_with_the_others(self, now: float) -> None:
        """End a process that never comes to the collective in which the others have waited."""
        told = self._lookout.told
        if told is None or self._lookout.gives_up:
            return
        self._alone_since = self._alone_since or now
        if now - self._alone_since < OUTLIVE:
            return
        if sys.__stderr__ is not None:
            sys.__stderr__.write(
                f"shardwise: rank {self._lookout.rank} ends, {OUTLIVE:g} s after rank {told.rank} "
                f"gave up, which says: {told.text}\n"
            )
            sys.__stderr__.flush()
        os._exit(1)
