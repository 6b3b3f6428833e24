"""Threads that move bytes to and from a file beside the work, with the GIL released."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec

from shardwise.errors import TierError

CHUNK = 4 * 2**20
"""Bytes of one transfer: 1 MB is a third slower here, 16 MB no faster."""

THREADS = 4
"""Transfers at once. Two are enough for the disk that this was measured on."""

_P = ParamSpec("_P")


class Transfers:
    """What moves in a few threads of this process; `label` names them, and stands in messages.

    A forked process has none of the threads and would wait for ever, so it is refused.
    """

    def __init__(self, label: str) -> None:
        self._label = label
        self._process = os.getpid()
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix=f"shardwise-{label}")
        # Without waiting: it may be one of the threads that lets go of this last.
        weakref.finalize(self, self._threads.shutdown, wait=False).atexit = False

    def start(self, move: Callable[_P, None], *args: _P.args, **kwargs: _P.kwargs) -> Future[None]:
        """Call `move` in a thread, as soon as one is free."""
        return self._threads.submit(move, *args, **kwargs)

    @property
    def forked(self) -> bool:
        """Whether this process was forked from the one that has the threads."""
        return self._process != os.getpid()

    def check(self) -> None:
        """Raise TierError in a forked process."""
        if self.forked:
            raise TierError(
                f"{self._label} rests on a file of process {self._process}, and this is process "
                f"{os.getpid()}, forked from it. Use the state in the process that made it."
            )

    def end(self) -> None:
        """Return when all is moved and the threads are gone."""
        self._threads.shutdown()
