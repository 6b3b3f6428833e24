"""Writes memory of an accelerator to a spool on a disk and brings it back, through pinned blocks.

    write    device ══▶ block ──▶ file          in threads of the spool, beside the work
    read     file ──▶ block ══▶ device          the copies (══▶) on the copy streams

A thread has two blocks, so all of them take 32 MB, whatever is on its way. The thread that trains
waits for the disk alone, where it needs what is not read yet; the present stream waits for copies.
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
    """A record that is being read back to the device, into `data`."""

    def __init__(self, copy_stream: CopyStream, data: Tensor) -> None:
        self.data = data
        self.events: list[Any] = []
        """Of the copies, once the thread that reads has started them all."""
        self._copy_stream = copy_stream

    def arrived(self) -> Tensor:
        """The bytes, for which the present stream waits; their record must have been read.

        It need not be the stream under which they were asked for.
        """
        for event in self.events:
            self._copy_stream.await_(event)
        self._copy_stream.used_here(self.data)
        return self.data


class DeviceSpool:
    """A spool for memory of the accelerator whose copies run on `copy_stream`."""

    def __init__(self, spool: Spool, copy_stream: CopyStream) -> None:
        self._spool = spool
        self._copy_stream = copy_stream
        self._own = threading.local()

    def write(self, data: Tensor) -> SpoolRecord:
        """Start writing `data` (1-D, uint8, contiguous, on the device), as the present stream has
        it now. It must stay as it is until the record has been waited for.

        Raises TierError in a forked process.
        """
        ready = self._copy_stream.here()

        def write(start: int) -> None:  # in a thread
            for piece in pieces.down(self._copy_stream, self._ring(), data, [ready]):
                self._spool.file.write(piece.pages, start + piece.first)

        return self._spool.put(data.numel(), write)

    def read(self, record: SpoolRecord) -> Coming:
        """Start to bring back a record whose last request has ended. What comes is there when the
        record has been waited for, and then its `arrived`.

        Raises TierError in a forked process.
        """
        data, ready = self._copy_stream.room(record.nbytes)
        coming = Coming(self._copy_stream, data)

        def read(start: int) -> None:  # in a thread
            ring = self._ring()
            for piece in pieces.up(self._copy_stream, ring, data, [ready]):
                self._spool.file.read(piece.pages, start + piece.first)
            coming.events = ring.copies

        self._spool.get(record, read)
        return coming

    def _ring(self) -> StagingRing:
        """This thread's own blocks."""
        if not hasattr(self._own, "ring"):
            self._own.ring = self._copy_stream.ring(CHUNK)
        ring: StagingRing = self._own.ring
        return ring
