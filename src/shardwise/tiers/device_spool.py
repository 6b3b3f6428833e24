"""Spools accelerator memory to a disk through pinned blocks.

    write    device ══▶ block ──▶ file          in the spool's threads, in parallel with training
    read     file ──▶ block ══▶ device          copies (══▶) run on the copy streams

Each thread has two blocks. All blocks together take 32 MB, regardless of the amount of data. The
training thread waits only for the disk, and only if it needs a record that has not been read yet.
The current stream waits for copies.
"""

from __future__ import annotations

import threading
from typing import Any

from torch import Tensor

from shardwise.tiers import pieces
from shardwise.tiers.copy_stream import CopyStream
from shardwise.tiers.direct_io import CHUNK
from shardwise.tiers.spool import Spool, SpoolRecord
from shardwise.tiers.staging import StagingRing


class Coming:
    """A record that is being read back to the device, into `data`: uint8 of shape (nbytes,)."""

    def __init__(self, copy_stream: CopyStream, data: Tensor) -> None:
        self.data = data
        self.events: list[Any] = []
        """Events of the copies. Set once the reading thread has started all of them."""
        self._copy_stream = copy_stream

    def arrived(self) -> Tensor:
        """Make the current stream wait for the copies, and return the bytes.

        Call `SpoolRecord.wait` first. The current stream need not be the one that was current at
        `read`.
        """
        for event in self.events:
            self._copy_stream.await_(event)
        self._copy_stream.used_here(self.data)
        return self.data


class DeviceSpool:
    """Spools accelerator memory to a disk. Copies between device and host run on `copy_stream`."""

    def __init__(self, spool: Spool, copy_stream: CopyStream) -> None:
        self._spool = spool
        self._copy_stream = copy_stream
        self._own = threading.local()

    def write(self, data: Tensor) -> SpoolRecord:
        """Start writing `data` (1-D, uint8, contiguous, on the device).

        The write waits for the work on the current stream. `data` must not change until
        `SpoolRecord.wait` has returned. Raises TierError in a forked process.
        """
        ready = self._copy_stream.here()

        def write(start: int) -> None:  # runs in a thread
            for piece in pieces.down(self._copy_stream, self._ring(), data, [ready]):
                self._spool.file.write(piece.pages, start + piece.first)

        return self._spool.put(data.numel(), write)

    def read(self, record: SpoolRecord) -> Coming:
        """Start reading a record that has no pending request.

        To get the bytes, first wait for the record, then call `arrived` on the result. Raises
        TierError in a forked process.
        """
        data, ready = self._copy_stream.room(record.nbytes)
        coming = Coming(self._copy_stream, data)

        def read(start: int) -> None:  # runs in a thread
            ring = self._ring()
            for piece in pieces.up(self._copy_stream, ring, data, [ready]):
                self._spool.file.read(piece.pages, start + piece.first)
            coming.events = ring.copies

        self._spool.get(record, read)
        return coming

    def _ring(self) -> StagingRing:
        """Return this thread's blocks."""
        if not hasattr(self._own, "ring"):
            self._own.ring = self._copy_stream.ring(CHUNK)
        ring: StagingRing = self._own.ring
        return ring
