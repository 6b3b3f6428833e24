"""Kills ranks on this host that are stopped for too long, so that the others can continue.

A rank that is stopped, for example by SIGSTOP, keeps its sockets open. Without this module, the
other ranks would wait for it until `--timeout`, and a rank that resumed after that would act on an
outdated state.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from shardwise.watch.status_server import StatusServer

TICK = 1.0
"""Maximum time in seconds between two checks of the processes' states."""


class Fence:
    """A thread that monitors the processes of `members`, and kills those stopped for too long.

    Args:
        server: This rank's status server, which knows the processes.
        members: Returns the remaining ranks.
        limit: Maximum time in seconds for which a process may be stopped.
    """

    def __init__(
        self, server: StatusServer, members: Callable[[], Sequence[int]], limit: float
    ) -> None:
        self._server = server
        self._members = members
        self._limit = limit
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="shardwise-fence", daemon=True).start()

    def close(self) -> None:
        """Stop the thread."""
        self._closed.set()

    def _run(self) -> None:
        tick = min(TICK, self._limit / 8)
        stopped: dict[int, float] = {}  # rank -> when it was first seen stopped
        last = time.monotonic()
        while not self._closed.wait(tick):
            now = time.monotonic()
            # Ctrl-Z stops all ranks, this one too. When they wake up, begin to count again.
            if now - last > 3 * tick:
                stopped.clear()
            last = now
            seen = {rank for rank in self._members() if self._server.is_stopped(rank)}
            stopped = {rank: stopped.get(rank, now) for rank in seen}
            for rank, since in stopped.items():
                if now - since > self._limit:
                    self._server.kill(rank)
