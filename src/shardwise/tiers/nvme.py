"""Records of a state on a disk: read ahead, written behind.

    order          0        1        2        3
    read        [ 0 ][ 1 ][ 2 ][ 3 ]
    update           [ 0 ][ 1 ][ 2 ][ 3 ]
    write                 [ 0 ][ 1 ][ 2 ][ 3 ]

A record is the flat bytes of one bucket. It passes through one of a few staging buffers, which
are all the memory that a store takes, whatever it holds. Threads move the bytes, cut into chunks,
with the GIL released.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from itertools import accumulate, islice
from pathlib import Path

from torch import Tensor

from shardwise.errors import TierError
from shardwise.tiers.direct_io import DirectFile
from shardwise.tiers.staging import Staging, padded
from shardwise.tiers.transfers import CHUNK, Transfers

IN_FLIGHT = 4
"""Records in memory at once: one in use, one being read, one being written, and one that absorbs
what the three differ in. With 3 a busy machine loses a tenth more of the disk's rate."""

Transfer = list["Future[None]"]
"""The chunks of a record on their way."""


class Loan:
    """A record in a staging buffer, lent by a store: `write` or `give_back` ends it."""

    def __init__(self, store: Store, index: int, buffer: Staging, coming: Transfer) -> None:
        self.index = index
        self.buffer = buffer
        self.coming = coming
        self._store = store

    def wait(self) -> Tensor:
        """The record's bytes once they are here: uint8, flat, starting on a page, so that
        `.view(dtype)` works. They may be changed until the loan ends.

        Raises:
            TierError: The disk failed, now or in an earlier transfer.
        """
        return self._store._arrived(self)

    def write(self) -> None:
        """Start to write the bytes back and return at once; the tensor must not be used again.

        Raises:
            TierError: The disk failed, now or in an earlier transfer.
        """
        self._store._write(self)

    def give_back(self) -> None:
        """End the loan; what was changed is forgotten. Never raises for the disk's sake: a
        failure is told by the store's next call."""
        self._store._give_back(self)


class Store:
    """Flat records of one state on a file of one rank; what rests here is nowhere else.

    Record i has `records[i]` bytes, 0 allowed, and is zeros until it is written. At most
    `in_flight` (2 or more) are in memory at once, each in a buffer of the largest record's size.
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
    ) -> None:
        assert in_flight >= 2, "one buffer cannot be read ahead"
        self.label = label
        self.records = tuple(records)
        sizes = [padded(nbytes) for nbytes in records]
        *self._offsets, self.nbytes = accumulate(sizes, initial=0)
        self._file = DirectFile(folder, label, rank, self.nbytes)
        self.direct = self._file.direct
        # A record is lent once at a time, so no more buffers than records are ever needed.
        self._free = [Staging(max(sizes)) for _ in range(min(in_flight, len(sizes)))]
        self.staging_bytes = sum(buffer.tensor.numel() for buffer in self._free)
        self._buffers = len(self._free)
        self._lent: dict[int, Loan] = {}
        self._behind: dict[int, tuple[Staging, Transfer]] = {}
        self._failure: TierError | None = None
        self._told = False
        self._closed = False
        self._transfers = Transfers(label)

    def read(self, index: int) -> Loan:
        """Start to read record `index` and return at once, unless all buffers are still being
        written: then once the oldest is free. A record that is lent is not lent again.

        Raises:
            TierError: An earlier transfer failed.
        """
        return self._lend(index, read=True)

    def blank(self, index: int) -> Loan:
        """A buffer for record `index` with anything in it, to be filled whole and written.

        Raises:
            TierError: An earlier transfer failed.
        """
        return self._lend(index, read=False)

    def sweep(self, order: Iterable[int], *, write: bool) -> Iterator[tuple[int, Tensor]]:
        """Each record of `order` (none twice) in turn, as (index, uint8 tensor).

        The tensor is the caller's until the next one is asked for; then it is written behind if
        `write`. The records that follow are read meanwhile. A record is not written whose turn
        ends by an exception or a break. The last writes go on after the end: see `drain`.

        Raises:
            TierError: A transfer failed.
        """
        indices = iter(order)
        ahead = max(1, self._buffers - (2 if write else 1))
        coming = deque(map(self.read, islice(indices, ahead)))
        try:
            while coming:
                coming.extend(map(self.read, islice(indices, 1)))
                loan = coming[0]
                yield loan.index, loan.wait()
                if write:
                    loan.write()
                else:
                    loan.give_back()
                coming.popleft()
        finally:
            for loan in coming:
                loan.give_back()

    def drain(self) -> None:
        """Wait until everything is written.

        Raises:
            TierError: A transfer failed.
        """
        self._check()
        while self._behind:
            self._retire(next(iter(self._behind)))
        self._raise_failure()

    def close(self) -> None:
        """Give disk, buffers and threads back, when what is in flight has landed. What was stored
        is gone. May be called again.

        Raises:
            TierError: A transfer failed, and no call has said so yet.
        """
        if self._closed:
            return
        self._closed = True
        if self._transfers.forked:
            self._file.close()  # this process's descriptor: threads and transfers are the other's
            return
        self._transfers.end()
        for _, transfer in self._behind.values():
            self._land(transfer)
        for loan in self._lent.values():
            self._land(loan.coming)
        self._behind.clear()
        self._lent.clear()
        self._free.clear()
        self._file.close()
        if not self._told:
            self._raise_failure()

    def _lend(self, index: int, *, read: bool) -> Loan:
        self._check()
        assert index not in self._lent, f"record {index} of {self.label} is lent already"
        if index in self._behind:
            # Its bytes are still here: wait for the write, and no read is needed.
            buffer, coming = self._behind.pop(index)
        else:
            buffer = self._buffer()
            coming = self._start(self._file.read, index, buffer) if read else []
        loan = self._lent[index] = Loan(self, index, buffer, coming)
        return loan

    def _arrived(self, loan: Loan) -> Tensor:
        self._check()
        assert self._lent.get(loan.index) is loan, "this loan has ended"
        self._land(loan.coming)
        self._raise_failure()
        return loan.buffer.tensor[: self.records[loan.index]]

    def _write(self, loan: Loan) -> None:
        self._arrived(loan)
        del self._lent[loan.index]
        transfer = self._start(self._file.write, loan.index, loan.buffer)
        self._behind[loan.index] = loan.buffer, transfer

    def _give_back(self, loan: Loan) -> None:
        if self._lent.get(loan.index) is loan and not self._transfers.forked:
            self._land(loan.coming)
            del self._lent[loan.index]
            self._free.append(loan.buffer)

    def _buffer(self) -> Staging:
        """A free one; else the first whose write is done."""
        if not self._free:
            assert self._behind, f"all {self._buffers} buffers of {self.label} are lent"
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
        return [
            self._transfers.start(move, buffer.view[a : min(a + CHUNK, nbytes)], offset + a)
            for a in range(0, nbytes, CHUNK)
        ]

    def _land(self, transfer: Transfer) -> None:
        """Wait for all chunks, since the buffer is theirs until then; keep the first failure."""
        wait(transfer)
        for chunk in transfer:
            error = chunk.exception()
            if error is not None and self._failure is None:
                assert isinstance(error, TierError), error
                self._failure = error

    def _check(self) -> None:
        """Refuse what cannot be done any more, and tell of any write that has failed meanwhile."""
        self._transfers.check()
        if self._closed:
            raise TierError(f"{self.label} was closed: what it held is gone. Make a new store.")
        for index in [i for i, (_, t) in self._behind.items() if all(map(Future.done, t))]:
            self._retire(index)
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            self._told = True
            raise TierError(str(self._failure)) from self._failure
