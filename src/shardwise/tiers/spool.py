"""Writes and reads short-lived records of any size on a file without a name, beside the work.

    write      data ─▶ staging of a thread ─▶ file      as many at once as there are threads
    read       file ─▶ memory of its own                freed as the tensor is
    drop       the range is free for the next write

`nvme.py` has the records of a state instead: few sizes, one thread, one order.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import numpy as np
from torch import Tensor

from shardwise.errors import TierError
from shardwise.extents import Extents
from shardwise.tiers.direct_io import CHUNK, DirectFile, Transfers
from shardwise.tiers.host_memory import Staging, mapped, padded


class SpoolRecord:
    """A range of the file, and what is under way there. Freed when nobody holds it any more.

    `last` is the request that was made last, a write or a read; those before it have ended.
    """

    def __init__(self, spool: Spool, start: int, nbytes: int, last: Future[None]) -> None:
        self.start = start
        self.nbytes = nbytes
        self.last = last
        self._spool = spool

    def wait(self) -> None:
        """Return when the last request has ended; raises TierError when it failed."""
        self._spool.check()
        error = self.last.exception()
        if isinstance(error, TierError):
            # A new one: the request's own would hold the caller's frames, and so what they hold,
            # for as long as this record lives.
            raise TierError(str(error)) from None
        self.last.result()

    def __del__(self) -> None:
        # From any thread at any moment, so that no lock of the spool may be taken here; and in a
        # forked process the request's own may be held by a thread that is not there.
        if self._spool.forked:
            return
        place = (self.start, padded(self.nbytes))
        freed = self._spool.freed
        self.last.add_done_callback(lambda _: freed.append(place))


class Spool:
    """A file in `folder` that holds records until they are dropped; it goes with the last of them.

    Any thread may use it. `label` and `rank` stand in the messages. A forked process must not use
    it.

    Raises TierError when `folder` is missing, not writable or in memory; later, from what waits
    for a record, when the disk is full or fails.
    """

    def __init__(self, folder: Path, label: str, *, rank: int) -> None:
        self.freed: deque[tuple[int, int]] = deque()
        """Ranges that are free again, not yet given to the extents."""
        self._extents = Extents()
        self._lock = threading.Lock()
        self._own = threading.local()
        self._file = DirectFile(folder, label, rank)
        self._transfers = Transfers(label)

    def write(self, data: Tensor, ready: Callable[[], None] | None = None) -> SpoolRecord:
        """Start writing `data` (1-D, uint8, contiguous, CPU), which must stay as it is until that
        has ended. `ready` is waited for first, beside the work.

        Raises TierError in a forked process.
        """
        self.check()
        with self._lock:
            while self.freed:
                self._extents.give(*self.freed.popleft())
            start = self._extents.take(padded(data.numel()))
        written = self._transfers.start(self._write, start, data, ready)
        return SpoolRecord(self, start, data.numel(), written)

    def read(self, record: SpoolRecord) -> Tensor:
        """Start reading a record whose last request has ended, into memory (1-D, uint8) that holds
        it when `record.wait` returns.

        Raises TierError in a forked process.
        """
        self.check()
        memory = mapped(padded(record.nbytes))
        into = memory.numpy().data
        record.last = self._transfers.start(self._file.read, into, record.start)
        return memory[: record.nbytes]

    @property
    def in_use(self) -> int:
        """Bytes of records that are held, in whole pages."""
        return self._extents.in_use - sum(nbytes for _, nbytes in self.freed)

    @property
    def forked(self) -> bool:
        """Whether this process was forked from the one that the records are of."""
        return self._transfers.forked

    def check(self) -> None:
        """Raise TierError in a forked process."""
        self._transfers.check()

    def _write(self, start: int, data: Tensor, ready: Callable[[], None] | None) -> None:
        """In a thread: write by way of its staging, since `data` lies anywhere."""
        if ready is not None:
            ready()
        view = self._staging().view
        target = np.frombuffer(view, dtype=np.uint8)
        source = data.numpy()
        for first in range(0, source.size, CHUNK):
            piece = source[first : first + CHUNK]
            # Not torch's copy, which would start threads of its own for each of these.
            np.copyto(target[: piece.size], piece)
            self._file.write(view[: padded(piece.size)], start + first)

    def _staging(self) -> Staging:
        """This thread's own."""
        if not hasattr(self._own, "staging"):
            self._own.staging = Staging(CHUNK)
        staging: Staging = self._own.staging
        return staging
