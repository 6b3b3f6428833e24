"""Writes a rank's byte ranges into files that all ranks share.

    memory ─┬─ thread: pwrite ──▶ file, writeback starts at once ──▶ fsync at the end
            └─ caller: CRC-32 ──▶ one per tensor, combined across ranks

Writing and checksums overlap: the disk writes while the caller computes the next checksum.
"""

from __future__ import annotations

import ctypes
import os
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread
from typing import Protocol

from shardwise.checkpoint.checksum import ChecksumPart
from shardwise.checkpoint.format import PlacedTensor, TensorFile
from shardwise.layout.byte_ranges import Extent

CHUNK = 8 * 2**20
"""Maximum number of bytes per write. The next checksum is computed while a chunk is written."""

WORTH_STARTING = 2**20
"""Minimum size in bytes of a range whose writeback is started early."""

TensorKey = tuple[str, str]
"""Key of a tensor: the name of its set, and its name in the set."""


class TensorSink(Protocol):
    """Receives ranges of tensors. A sink may read their memory until its `settle` returns."""

    def write(self, kind: str, ranges: Sequence[Extent], memory: memoryview) -> None:
        """Receive ranges of tensors.

        Args:
            kind: Name of the set that contains the tensors.
            ranges: Byte positions of the ranges in `memory` and in the tensors.
            memory: The bytes.
        """

    def settle(self) -> None:
        """Block until the caller may modify the memory of all earlier writes."""


def create(folder: Path, files: Iterable[TensorFile]) -> None:
    """Create files with their headers and full length. Raises OSError if the disk fails."""
    for file in files:
        with (folder / file.name).open("xb") as out:
            out.write(file.header)
            # Set the full length now, because ranks write their ranges in any order.
            out.truncate(file.nbytes)


class Writer:
    """TensorSink that writes ranges to files, and computes their checksums.

    Only `finish` raises disk errors. If another method raised one, this rank would miss its next
    collective, and other ranks would wait for it.

    Args:
        folder: Folder with the files that `create` has created.
        sets: Layout of the files of each set.
    """

    def __init__(self, folder: Path, sets: Mapping[str, Sequence[TensorFile]]) -> None:
        self._folder = folder
        self._placed: dict[TensorKey, PlacedTensor] = {
            (kind, name): placed
            for kind, files in sets.items()
            for file in files
            for name, placed in file.tensors.items()
        }
        self._files: dict[str, int] = {}
        # Not an executor, because the interpreter shuts executors down before it joins the thread
        # of a background save.
        self._orders: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        # Not a daemon thread, because a save in progress must finish before the interpreter exits.
        self._thread = Thread(target=self._run_orders, name="shardwise-checkpoint-writer")
        self._thread.start()
        self._parts: dict[TensorKey, list[ChecksumPart]] = defaultdict(list)
        self._failure: BaseException | None = None

    def write(self, kind: str, ranges: Sequence[Extent], memory: memoryview) -> None:
        """Queue `ranges` for writing, and compute their checksums."""
        for extent in ranges:
            tensor = kind, extent.tensor
            data = memory[extent.start : extent.end]
            self._orders.put(partial(self._put, self._placed[tensor], extent.offset, data))
            # Compute the checksum here while the thread writes the same bytes.
            self._parts[tensor].append(ChecksumPart(extent.offset, len(data), zlib.crc32(data)))

    def settle(self) -> None:
        """Block until all earlier ranges are in the page cache."""
        done = Event()
        # The thread runs orders sequentially, so it runs this one after all earlier writes.
        self._orders.put(done.set)
        done.wait()

    def finish(self) -> dict[TensorKey, list[ChecksumPart]]:
        """Wait until all ranges are on disk, and return their checksums.

        Raises OSError if a write failed.
        """
        self.settle()
        if self._failure is None:
            # Every rank calls fsync, because the call flushes only the page cache of one host.
            for fd in self._files.values():
                os.fsync(fd)
        self.close()
        if self._failure is not None:
            raise self._failure
        return dict(self._parts)

    def close(self) -> None:
        """Stop the thread and close the files. Idempotent."""
        self._orders.put(None)
        self._thread.join()
        while self._files:
            os.close(self._files.popitem()[1])

    def _run_orders(self) -> None:
        """Run queued writes until `close`. After an error, the remaining writes do nothing."""
        while (order := self._orders.get()) is not None:
            try:
                order()
            except BaseException as error:  # `finish` raises it in the caller's thread
                self._failure = self._failure or error

    def _put(self, placed: PlacedTensor, at: int, data: memoryview) -> None:
        if self._failure is not None:
            return
        # Open files on first use, because a rank may write to only some files of a split set.
        fd = self._files.get(placed.file)
        if fd is None:
            fd = self._files[placed.file] = os.open(
                self._folder / placed.file, os.O_WRONLY | os.O_CLOEXEC
            )
        offset = placed.begin + at
        assert offset + len(data) <= placed.end, "a rank writes within its tensor"
        first = offset
        # pwrite may write fewer bytes than requested, for example if a quota is almost used up.
        while data:
            written = os.pwrite(fd, data, offset)
            data, offset = data[written:], offset + written
        start = _sync_file_range()
        if start is not None and offset - first >= WORTH_STARTING:
            # The disk then writes while the next ranges are processed. This is only a hint, because
            # the final fsync waits for all data and reports errors.
            start(fd, ctypes.c_int64(first), ctypes.c_int64(offset - first), _WRITE)


@cache
def _sync_file_range() -> Callable[..., int] | None:
    """Return Linux's sync_file_range, which Python does not wrap, or None on other systems."""
    function: Callable[..., int] | None = getattr(ctypes.CDLL(None), "sync_file_range", None)
    return function


_WRITE = 2
"""SYNC_FILE_RANGE_WRITE: start writeback without waiting for it."""
