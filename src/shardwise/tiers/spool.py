"""Writes and reads short-lived records of any size on a file without a name, beside the work.

    write      data ─▶ staging of a thread ─▶ file      as many at once as there are threads
    read       file ─▶ memory of its own                freed as the tensor is
    drop       the range is free for the next write

`put` and `get` move a record by another way (`device_spool.py`). `nvme.py` has the records of a
state instead: few sizes, one thread, one order.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import numpy as np
from torch import Tensor

from shardwise.errors import TierError
from shardwise.layout.extents import Extents
from shardwise.tiers.direct_io import CHUNK, DirectFile, Transfers
from shardwise.tiers.host_memory import mapped, padded
from shardwise.tiers.staging import Staging


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
        self.file = DirectFile(folder, label, rank)
        self._transfers = Transfers(label)

    def write(self, data: Tensor) -> SpoolRecord:
        """Start writing `data` (1-D, uint8, contiguous, CPU), which must stay as it is until that
        has ended.

        Raises TierError in a forked process.
        """
        return self.put(data.numel(), partial(self._write, data))

    def put(self, nbytes: int, write: Callable[[int], None]) -> SpoolRecord:
        """Start a record of `nbytes`: in a thread, `write` is given its place in the file.

        Raises TierError in a forked process.
        """
        self.check()
        with self._lock:
            while self.freed:
                self._extents.give(*self.freed.popleft())
            start = self._extents.take(padded(nbytes))
        return SpoolRecord(self, start, nbytes, self._transfers.start(write, start))

    def read(self, record: SpoolRecord) -> Tensor:
        """Start reading a record whose last request has ended, into memory (1-D, uint8) that holds
        it when `record.wait` returns.

        Raises TierError in a forked process.
        """
        memory = mapped(padded(record.nbytes))
        self.get(record, partial(self.file.read, memory.numpy().data))
        return memory[: record.nbytes]

    def get(self, record: SpoolRecord, read: Callable[[int], None]) -> None:
        """Start reading a record whose last request has ended: in a thread, `read` is given its
        place in the file.

        Raises TierError in a forked process.
        """
        self.check()
        record.last = self._transfers.start(read, record.start)

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

    def _write(self, data: Tensor, start: int) -> None:
        """In a thread: write by way of its staging, since `data` lies anywhere."""
        view = self._staging().view
        target = np.frombuffer(view, dtype=np.uint8)
        source = data.numpy()
        for first in range(0, source.size, CHUNK):
            piece = source[first : first + CHUNK]
            # Not torch's copy, which would start threads of its own for each of these.
            np.copyto(target[: piece.size], piece)
            self.file.write(view[: padded(piece.size)], start + first)

    def _staging(self) -> Staging:
        """This thread's own."""
        if not hasattr(self._own, "staging"):
            self._own.staging = Staging(CHUNK)
        staging: Staging = self._own.staging
        return staging
