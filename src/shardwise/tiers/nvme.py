"""NVMe read-ahead: records of a state on a disk, read ahead of their use and written behind it.

    order          0        1        2        3
    read        [ 0 ][ 1 ][ 2 ][ 3 ]
    update           [ 0 ][ 1 ][ 2 ][ 3 ]
    write                 [ 0 ][ 1 ][ 2 ][ 3 ]

`states/optimizer/offload_read_ahead.py` decides what is read ahead, and when. A record is the flat
bytes of one span of a bucket. It passes through one of a few staging buffers, which are all the
memory that a store takes, whatever it holds. Threads move the bytes, cut into chunks, with the GIL
released.

Where an accelerator uses the state, the buffers are pinned, and its copies go to and from them
without a stop. The lease of a buffer may end while a copy is on its way (`copies`): then it is the
thread of the next transfer that waits for it, and not the one that trains.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from itertools import accumulate
from pathlib import Path
from typing import Any

from torch import Tensor

from shardwise.errors import TierError
from shardwise.tiers.direct_io import CHUNK, DirectFile, Transfers
from shardwise.tiers.host_memory import padded
from shardwise.tiers.staging import Staging, settle

IN_FLIGHT = 4
"""Records in memory at once: one in use, one being read, one being written, and one that absorbs
what the three differ in. With 3 a busy machine loses a tenth more of the disk's rate."""

Transfer = list["Future[None]"]
"""The chunks of a record on their way."""


class BufferLease:
    """The use of a staging buffer for one record of a store, until `write` or `give_back`."""

    def __init__(self, store: Store, index: int, buffer: Staging, coming: Transfer) -> None:
        self.index = index
        self.buffer = buffer
        self.coming = coming
        self._store = store

    def wait(self) -> Tensor:
        """The record's bytes once they are here: uint8, flat, starting on a page, so that
        `.view(dtype)` works. They may be changed until the lease ends.

        Raises:
            TierError: The disk failed, now or in an earlier transfer.
        """
        data = self._store._arrived(self)
        self.buffer.settle()
        return data

    def wait_for_disk(self) -> Tensor:
        """As `wait`, for a copy of an accelerator that comes after the events `copies`, for which
        the host need not wait."""
        return self._store._arrived(self)

    @property
    def copies(self) -> list[Any]:
        """Events of the copies that still read or write the buffer."""
        return self.buffer.copies

    def copied(self, event: Any) -> None:
        """A copy between the buffer and an accelerator is on its way until `event`."""
        self.buffer.copies.append(event)

    def write(self) -> None:
        """Start to write the bytes back and return at once; the tensor must not be used again.

        Raises:
            TierError: The disk failed, now or in an earlier transfer.
        """
        self._store._write(self)

    def give_back(self) -> None:
        """End the lease; what was changed is forgotten. Never raises for the disk's sake: a
        failure is reported by the store's next call."""
        self._store._give_back(self)


class Store:
    """Stores flat records of one state on a file of one rank; what rests here is nowhere else.

    Record i has `records[i]` bytes, 0 allowed, and is zeros until it is written. At most
    `in_flight` (2 or more) are in memory at once, each in a buffer of the largest record's size;
    `pages` makes the buffers' memory of a size and a number, where it is to be pinned.
    The file has no name and is gone with the process, however that ends: there is nothing to
    sweep after a crash.

    One thread at a time may use a store. After a failed transfer every call but `close` raises,
    since some record is neither old nor new. A forked process must not use it.

    Raises:
        TierError: `folder` is missing, not writable or in memory, or its disk has no room.
    """

    def __init__(
        self,
        folder: Path,
        label: str,
        records: Sequence[int],
        *,
        rank: int,
        in_flight: int = IN_FLIGHT,
        pages: Callable[[int, int], Sequence[Tensor]] | None = None,
    ) -> None:
        assert in_flight >= 2, "one buffer cannot be read ahead"
        self.label = label
        self.records = tuple(records)
        sizes = [padded(nbytes) for nbytes in records]
        *self._offsets, self.nbytes = accumulate(sizes, initial=0)
        self._file = DirectFile(folder, label, rank, self.nbytes)
        self.direct = self._file.direct
        # A record is leased once at a time, so no more buffers than records are ever needed.
        count, largest = min(in_flight, len(sizes)), max(sizes, default=0)
        # A rank may own nothing of a bucket: then there is nothing to pin.
        memories = pages(largest, count) if pages is not None and count else [None] * count
        self._free = [Staging(largest, memory) for memory in memories]
        self.staging_bytes = sum(buffer.tensor.numel() for buffer in self._free)
        self._buffers = len(self._free)
        self._leased: dict[int, BufferLease] = {}
        self._behind: dict[int, tuple[Staging, Transfer]] = {}
        self._failure: TierError | None = None
        self._reported = False
        self._closed = False
        self._transfers = Transfers(label)

    def read(self, index: int) -> BufferLease:
        """Start to read record `index` and return at once, unless all buffers are still being
        written: then once the oldest is free. A record that is leased is not leased again.

        Raises:
            TierError: An earlier transfer failed.
        """
        return self._lease(index, read=True)

    def blank(self, index: int) -> BufferLease:
        """A buffer for record `index` with anything in it, to be filled whole and written.

        Raises:
            TierError: An earlier transfer failed.
        """
        return self._lease(index, read=False)

    def close(self) -> None:
        """Give disk, buffers and threads back, when what is in flight has landed. What was stored
        is gone. May be called again.

        Raises:
            TierError: A transfer failed, and no call has said so yet.
            RuntimeError: A copy to or from an accelerator failed.
        """
        if self._closed:
            return
        self._closed = True
        if self._transfers.forked:
            self._file.close()  # this process's descriptor: threads and transfers are the other's
            return
        self._transfers.end()
        try:
            for _, transfer in self._behind.values():
                self._land(transfer)
            for lease in self._leased.values():
                self._land(lease.coming)
        finally:  # all has ended, however it did
            self._behind.clear()
            self._leased.clear()
            self._free.clear()
            self._file.close()
        if not self._reported:
            self._raise_failure()

    def _lease(self, index: int, *, read: bool) -> BufferLease:
        self._check()
        assert index not in self._leased, f"record {index} of {self.label} is leased already"
        if index in self._behind:
            # Its bytes are still here: wait for the write, and no read is needed. A read from the
            # disk could overtake the write and give the bytes of before.
            buffer, coming = self._behind.pop(index)
        else:
            buffer = self._buffer()
            coming = self._start(self._file.read, index, buffer) if read else []
        lease = self._leased[index] = BufferLease(self, index, buffer, coming)
        return lease

    def _arrived(self, lease: BufferLease) -> Tensor:
        self._check()
        assert self._leased.get(lease.index) is lease, "this lease has ended"
        self._land(lease.coming)
        self._raise_failure()
        return lease.buffer.tensor[: self.records[lease.index]]

    def _write(self, lease: BufferLease) -> None:
        self._arrived(lease)
        del self._leased[lease.index]
        transfer = self._start(self._file.write, lease.index, lease.buffer)
        self._behind[lease.index] = lease.buffer, transfer

    def _give_back(self, lease: BufferLease) -> None:
        if self._leased.get(lease.index) is lease and not self._transfers.forked:
            self._land(lease.coming)
            del self._leased[lease.index]
            self._free.append(lease.buffer)

    def _buffer(self) -> Staging:
        """A free one; else the first whose write is done."""
        if not self._free:
            assert self._behind, f"all {self._buffers} buffers of {self.label} are leased"
            self._retire(next(iter(self._behind)))
            self._raise_failure()
        return self._free.pop()

    def _retire(self, index: int) -> None:
        buffer, transfer = self._behind.pop(index)
        self._land(transfer)
        self._free.append(buffer)

    def _start(
        self, move: Callable[[memoryview, int], None], index: int, buffer: Staging
    ) -> Transfer:
        offset, nbytes = self._offsets[index], padded(self.records[index])
        copies, buffer.copies = buffer.copies, []

        def after_copies(view: memoryview, offset: int) -> None:
            settle(copies)
            move(view, offset)

        return [
            self._transfers.start(after_copies, buffer.view[a : min(a + CHUNK, nbytes)], offset + a)
            for a in range(0, nbytes, CHUNK)
        ]

    def _land(self, transfer: Transfer) -> None:
        """Wait for all chunks, since the buffer is theirs until then; keep the first failure."""
        wait(transfer)
        for chunk in transfer:
            error = chunk.exception()
            if error is not None and not isinstance(error, TierError):
                raise error  # of a copy: the accelerator has failed, not the disk
            if error is not None and self._failure is None:
                self._failure = error

    def _check(self) -> None:
        """Refuse what cannot be done any more, and report any write that has failed meanwhile."""
        self._transfers.check()
        if self._closed:
            raise TierError(f"{self.label} was closed: what it held is gone. Make a new store.")
        for index in [i for i, (_, t) in self._behind.items() if all(map(Future.done, t))]:
            self._retire(index)
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            self._reported = True
            raise TierError(str(self._failure)) from self._failure
