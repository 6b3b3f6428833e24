"""Watches this rank's long waits: compares calls, warns about hangs, exits abandoned processes.

after 1 s   ask the missing ranks whether they are in the same collective
warn_after  make one rank (rank 0 if possible) report which ranks wait, which are missing, and
            where each rank is
after 20 s  exit if other ranks have aborted and this process has not noticed. mpiexec and srun
            would not stop it
"""

from __future__ import annotations

import os
import sys
import threading
import time

from shardwise.watch.hang_report import wait_warning
from shardwise.watch.status_server import ANSWER_SECONDS, StatusServer
from shardwise.watch.waits import Wait

TICK = 0.5
"""Seconds between two checks."""

COMPARE = 1.0
"""Seconds of waiting before a wait is compared with other ranks' calls. Doubled after each time."""

LATEST = 0.8
"""Latest time to report a wait, as a fraction of the timeout."""

OUTLIVE = 20.0
"""Seconds that a process may outlive ranks that have aborted. It cannot continue without them."""

SPEAKERS = 8
"""Maximum number of ranks that are asked, one after another, to write the report."""


class Watchdog:
    """A thread that watches the waits of one rank, the owner of `status_server`.

    It warns after a wait of `warn_after` seconds. The wait itself fails after `timeout` seconds.
    """

    def __init__(self, status_server: StatusServer, warn_after: float, timeout: float) -> None:
        self._status_server = status_server
        # A warning after the timeout would never be printed.
        self._warn_after = min(warn_after, LATEST * timeout)
        self._timeout = timeout
        self._ended = threading.Event()
        self._compared: dict[Wait, float] = {}
        self._warned: Wait | None = None
        self._reported: float | None = None
        self._aborted_since: float | None = None
        # Use a daemon thread, because process exit must not wait for ranks that do not answer.
        self._thread = threading.Thread(target=self._run, name="shardwise-watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self._thread.join(ANSWER_SECONDS)

    def _run(self) -> None:
        # If warn_after is short (in tests), check often enough to see a wait in time.
        while not self._ended.wait(min(TICK, self._warn_after / 4)):
            now = time.monotonic()
            waits = self._status_server.waits.all()
            self._compare(waits, now)
            wait = self._status_server.waits.longest()
            if wait is not None and now - wait.since >= self._warn_after:
                self._warn(wait)
            if self._status_server.report_is_due:
                self._status_server.report_is_due = False
                self._report()
            self._end_with_the_others(now)

    def _compare(self, waits: list[Wait], now: float) -> None:
        """For each long wait, check whether the missing ranks are in the same collective."""
        # Keep only open waits, so that the dict does not grow.
        self._compared = {wait: self._compared.get(wait, COMPARE) for wait in waits}
        for wait, due in self._compared.items():
            # The waiting thread clears `compare` when its wait ends, possibly right now.
            compare = wait.compare
            if compare is not None and now - wait.since >= due:
                self._compared[wait] = 2 * due
                compare()

    def _warn(self, wait: Wait) -> None:
        """Ask one rank, the first that answers, to report on behalf of all. Done once per wait."""
        if wait is self._warned:
            return
        self._warned = wait
        # All waiting ranks ask in the same order, so they normally ask the same rank.
        for rank in self._status_server.ranks[:SPEAKERS]:
            if self._status_server.ask_to_report(rank):
                return

    def _report(self) -> None:
        """Write the hang report to stderr, once for all requests within a short time."""
        now = time.monotonic()
        # All waiting ranks ask at about the same time, and a single report serves them all.
        if self._reported is not None and now - self._reported < self._warn_after / 2:
            return
        self._reported = now
        statuses = self._status_server.ask(self._status_server.ranks, stack=True)
        _write(wait_warning(statuses, self._timeout))

    def _end_with_the_others(self, now: float) -> None:
        """Exit if other ranks aborted some time ago and this process has not noticed."""
        abort, rank = self._status_server.abort, self._status_server.rank
        # If this rank's own code knows of the abort, it will raise. With `--survive` the others
        # wait for this rank, to go on without the one that was lost.
        if abort is None or self._status_server.is_aborting or self._status_server.answers:
            return
        self._aborted_since = self._aborted_since or now
        if now - self._aborted_since < OUTLIVE:
            return
        _write(
            f"shardwise: rank {rank} ends, {OUTLIVE:g} s after rank {abort.rank} failed: "
            f"{abort.text}\n"
        )
        os._exit(1)  # sys.exit would end only this thread


def _write(text: str) -> None:
    if text and sys.__stderr__ is not None:
        sys.__stderr__.write(text)
        sys.__stderr__.flush()
