"""Stores records of a state on a disk (NVMe), with read-ahead and asynchronous write-back.

    order          0        1        2        3
    read        [ 0 ][ 1 ][ 2 ][ 3 ]
    update           [ 0 ][ 1 ][ 2 ][ 3 ]
    write                 [ 0 ][ 1 ][ 2 ][ 3 ]

`states/optimizer/offloaded_update.py` decides which record is read ahead, and when. A record holds
the bytes of one span of a bucket. It passes through one of a few staging buffers, which are the
only memory that a store needs. Threads transfer the bytes in chunks, and release the GIL.

If the state is used on an accelerator, the buffers are pinned, and copies between them and the
accelerator are asynchronous. A buffer's lease may end while a copy is pending (`copies`). The
thread that runs the buffer's next transfer then waits for the copy; the training thread does not.
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
"""Number of records in memory at once: one in use, one being read, one being written, and one that
evens out their different speeds. With 3, a busy machine used a tenth less of the disk's bandwidth.
"""

Transfer = list["Future[None]"]
"""The pending chunks of a record."""


class BufferLease:
    """A staging buffer that is leased to one record of a store until `write` or `give_back`."""

    def __init__(self, store: Store, index: int, buffer: Staging, read: Transfer) -> None:
        self.index = index
        self.buffer = buffer
        self.read = read
        """Pending read of the record into the buffer. Empty if nothing is read."""
        self._store = store

    def wait(self) -> Tensor:
        """Wait until the record has been read, and return its bytes as uint8 of shape (nbytes,).

        The bytes are page-aligned, so `.view(dtype)` works. They may be modified until the lease
        ends.

        Raises:
            TierError: If the disk failed, now or in an earlier transfer.
        """
        data = self._store._wait_for(self)
        self.buffer.settle()
        return data

    def wait_for_disk(self) -> Tensor:
        """Wait until the record has been read, but not for pending copies. Return its bytes.

        A copy on an accelerator may use the bytes if it first waits for the events in `copies`.
        """
        return self._store._wait_for(self)

    @property
    def copies(self) -> list[Any]:
        """Events of the copies that still read or write the buffer."""
        return self.buffer.copies

    def add_copy(self, event: Any) -> None:
        """Register a copy between the buffer and an accelerator. `event` marks its completion."""
        self.buffer.copies.append(event)

    def write(self) -> None:
        """Start writing the bytes back, and end the lease. The tensor must not be used afterwards.

        Raises:
            TierError: If the disk failed, now or in an earlier transfer.
        """
        self._store.write_behind(self)

    def give_back(self) -> None:
        """End the lease without writing.

        Does not raise if the disk failed. The store's next call does.
        """
        self._store.give_back(self)


class Store:
    """Stores the records of one state of one rank in a file.

    A record holds zeros until it is written. The file has no name, so it is freed when the process
    exits.

    Only one thread at a time may use a store. After a failed transfer every call except `close`
    raises, because a record may have neither its old nor its new content. A forked process must not
    use a store.

    Args:
        folder: A folder on a disk.
        label: The state's name in messages.
        records: Size of each record in bytes; may be 0.
        rank: This rank's index, for messages.
        in_flight: Number of records in memory at once, at least 2. Each has a buffer of the largest
            record's size.
        pages: Allocates pinned memory for the buffers, given their size in bytes and their number.
            If None, the memory is not pinned.

    Raises:
        TierError: If `folder` does not exist, is not writable or is in memory, or its disk has too
            little space.
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
        # A record has one lease at a time, so more buffers than records are never needed.
        count, largest = min(in_flight, len(sizes)), max(sizes, default=0)
        # A rank may own no elements. In that case there is no memory to pin.
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
        """Start reading record `index`, and return its lease.

        Waits for the oldest write if all buffers are being written. A record has at most one lease
        at a time.

        Raises:
            TierError: If an earlier transfer failed.
        """
        return self._lease(index, read=True)

    def blank(self, index: int) -> BufferLease:
        """Lease a buffer with arbitrary content for record `index`, to be filled and written.

        Raises:
            TierError: If an earlier transfer failed.
        """
        return self._lease(index, read=False)

    def close(self) -> None:
        """Wait for pending transfers, then free the file, the buffers and the threads.

        The stored data is lost. May be called more than once.

        Raises:
            TierError: If a transfer failed and no call has reported it yet.
            RuntimeError: If a copy to or from an accelerator failed.
        """
        if self._closed:
            return
        self._closed = True
        if self._transfers.forked:
            self._file.close()  # the descriptor only: the parent owns the threads and transfers
            return
        self._transfers.end()
        try:
            for _, transfer in self._behind.values():
                self._finish_transfer(transfer)
            for lease in self._leased.values():
                self._finish_transfer(lease.read)
        finally:  # all transfers have completed, even if one failed
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
            # The record's bytes are still in the buffer, so the lease waits for the write and needs
            # no read. A read could overtake the write and return the old bytes.
            buffer, transfer = self._behind.pop(index)
        else:
            buffer = self._buffer()
            transfer = self._start(self._file.read, index, buffer) if read else []
        lease = self._leased[index] = BufferLease(self, index, buffer, transfer)
        return lease

    def _wait_for(self, lease: BufferLease) -> Tensor:
        self._check()
        assert self._leased.get(lease.index) is lease, "this lease has ended"
        self._finish_transfer(lease.read)
        self._raise_failure()
        return lease.buffer.tensor[: self.records[lease.index]]

    def write_behind(self, lease: BufferLease) -> None:
        """Implement `BufferLease.write`."""
        # Wait for a pending read, which would overwrite the buffer while it is being written.
        self._wait_for(lease)
        del self._leased[lease.index]
        transfer = self._start(self._file.write, lease.index, lease.buffer)
        self._behind[lease.index] = lease.buffer, transfer

    def give_back(self, lease: BufferLease) -> None:
        """Implement `BufferLease.give_back`."""
        if self._leased.get(lease.index) is lease and not self._transfers.forked:
            self._finish_transfer(lease.read)
            del self._leased[lease.index]
            self._free.append(lease.buffer)

    def _buffer(self) -> Staging:
        """Return a free buffer. If all are in use, wait for the oldest write."""
        # Choose the oldest write, because it has most likely completed.
        if not self._free:
            assert self._behind, f"all {self._buffers} buffers of {self.label} are leased"
            self._retire(next(iter(self._behind)))
            self._raise_failure()
        return self._free.pop()

    def _retire(self, index: int) -> None:
        buffer, transfer = self._behind.pop(index)
        self._finish_transfer(transfer)
        self._free.append(buffer)

    def _start(
        self, move: Callable[[memoryview, int], None], index: int, buffer: Staging
    ) -> Transfer:
        offset, nbytes = self._offsets[index], padded(self.records[index])
        # The threads wait for pending copies, not the caller. Every chunk waits for all copies,
        # because chunks may run in any order.
        copies, buffer.copies = buffer.copies, []

        def after_copies(view: memoryview, offset: int) -> None:
            settle(copies)
            move(view, offset)

        return [
            self._transfers.start(after_copies, buffer.view[a : min(a + CHUNK, nbytes)], offset + a)
            for a in range(0, nbytes, CHUNK)
        ]

    def _finish_transfer(self, transfer: Transfer) -> None:
        """Wait for all chunks of a transfer, and record the first failure."""
        # Wait for all chunks even after a failure, because the others still read or write the
        # buffer.
        wait(transfer)
        for chunk in transfer:
            error = chunk.exception()
            if error is not None and not isinstance(error, TierError):
                raise error  # a copy on the accelerator failed, not the disk
            if error is not None and self._failure is None:
                self._failure = error

    def _check(self) -> None:
        """Raise TierError if the store is closed or has failed, or if this process was forked."""
        self._transfers.check()
        if self._closed:
            raise TierError(f"{self.label} was closed, and its data is lost. Create a new store.")
        # Recycle the buffers of completed writes, and notice their failures.
        for index in [i for i, (_, t) in self._behind.items() if all(map(Future.done, t))]:
            self._retire(index)
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            self._reported = True
            raise TierError(str(self._failure)) from self._failure
