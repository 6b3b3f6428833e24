"""Stores short-lived records of any size in an unnamed file, in parallel with training.

    write      data ─▶ staging buffer of a thread ─▶ file      one at a time in each thread
    read       file ─▶ new memory                              freed with the tensor
    drop       the range of the file is free for the next write

With `put` and `get`, the caller transfers the bytes (see `device_spool.py`). For a state's records,
which come in few sizes and are used by one thread in a fixed order, see `nvme.py`.
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
    """A range of the file, freed when the last reference to this object is dropped.

    `last` is the most recent request, a write or a read. All earlier requests have completed.
    """

    def __init__(self, spool: Spool, start: int, nbytes: int, last: Future[None]) -> None:
        self.start = start
        self.nbytes = nbytes
        self.last = last
        self._spool = spool

    def wait(self) -> None:
        """Wait until the last request has completed. Raises TierError if it failed."""
        self._spool.check()
        error = self.last.exception()
        if isinstance(error, TierError):
            # Raise a new exception. Raising the request's own would attach the caller's frames to
            # it, and keep their objects alive as long as this record.
            raise TierError(str(error)) from None
        self.last.result()

    def __del__(self) -> None:
        # This may run in any thread at any moment, so it must not take the spool's lock. In a
        # forked process, a thread that does not exist there may hold the request's lock.
        if self._spool.forked:
            return
        place = (self.start, padded(self.nbytes))
        freed = self._spool.freed
        self.last.add_done_callback(lambda _: freed.append(place))


class Spool:
    """A file in `folder` for records. It is freed once the spool and all its records are freed.

    Any thread may use the spool, but a forked process must not. `label` and `rank` are used in
    messages.

    Raises TierError if `folder` does not exist, is not writable or is in memory. If the disk is
    full or fails later, waiting for the record raises TierError.
    """

    def __init__(self, folder: Path, label: str, *, rank: int) -> None:
        # A deque, because `SpoolRecord.__del__` appends to it without the lock; `append` is atomic.
        self.freed: deque[tuple[int, int]] = deque()
        """Ranges (start, nbytes) of dropped records that have not been returned to `_extents` yet.
        """
        self._extents = Extents()
        self._lock = threading.Lock()
        self._own = threading.local()
        self.file = DirectFile(folder, label, rank)
        self._transfers = Transfers(label)

    def write(self, data: Tensor) -> SpoolRecord:
        """Start writing `data` (1-D, uint8, contiguous, CPU).

        `data` must not change until the write has completed. Raises TierError in a forked process.
        """
        return self.put(data.numel(), partial(self._write, data))

    def put(self, nbytes: int, write: Callable[[int], None]) -> SpoolRecord:
        """Create a record of `nbytes`. A thread calls `write` with the record's offset in the file.

        Raises TierError in a forked process.
        """
        self.check()
        # Collect freed ranges here, because `SpoolRecord.__del__` must not take the lock.
        with self._lock:
            while self.freed:
                self._extents.give(*self.freed.popleft())
            start = self._extents.take(padded(nbytes))
        return SpoolRecord(self, start, nbytes, self._transfers.start(write, start))

    def read(self, record: SpoolRecord) -> Tensor:
        """Start reading a record that has no pending request.

        Returns a 1-D uint8 tensor, which holds the record's bytes after `record.wait`. Raises
        TierError in a forked process.
        """
        # Direct transfers need page-aligned memory.
        memory = mapped(padded(record.nbytes))
        self.get(record, partial(self.file.read, memory.numpy().data))
        return memory[: record.nbytes]

    def get(self, record: SpoolRecord, read: Callable[[int], None]) -> None:
        """Start reading a record that has no pending request.

        A thread calls `read` with the record's offset in the file. Raises TierError in a forked
        process.
        """
        self.check()
        record.last = self._transfers.start(read, record.start)

    @property
    def in_use(self) -> int:
        """Size of the existing records in bytes, rounded up to whole pages."""
        return self._extents.in_use - sum(nbytes for _, nbytes in self.freed)

    @property
    def forked(self) -> bool:
        """True if this process was forked from the process that owns the records."""
        return self._transfers.forked

    def check(self) -> None:
        """Raise TierError if this is a forked process."""
        self._transfers.check()

    def _write(self, data: Tensor, start: int) -> None:
        """Write `data` through this thread's staging buffer. Runs in a transfer thread."""
        # A direct transfer needs aligned memory. `data` need not be aligned, but the buffer is.
        if not hasattr(self._own, "staging"):
            self._own.staging = Staging(CHUNK)
        view = self._own.staging.view
        target = np.frombuffer(view, dtype=np.uint8)
        source = data.numpy()
        for first in range(0, source.size, CHUNK):
            piece = source[first : first + CHUNK]
            # Use NumPy, because torch's copy would start more threads in each of these threads.
            np.copyto(target[: piece.size], piece)
            self.file.write(view[: padded(piece.size)], start + first)
