"""Writes a rank's byte ranges into files that all ranks write together.

    memory ─┬─ a thread: pwrite ──▶ file, on its way to the disk at once ──▶ fsync at the end
            └─ here: CRC-32 ──▶ one per tensor, joined with those of the other ranks

So the disk works while what follows is summed.
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
from shardwise.checkpoint.format import Placed, TensorFile
from shardwise.layout.byte_ranges import ByteRange

CHUNK = 8 * 2**20
"""Bytes that are written in one call: while one is on its way the next is summed."""

WORTH_STARTING = 2**20
"""Bytes from which on the disk is told of a range by itself."""

Tensor = tuple[str, str]
"""A set of tensors, and a name in it."""


class TensorSink(Protocol):
    """Takes ranges of tensors; it may read `memory` until `settle` has returned."""

    def write(self, kind: str, ranges: Sequence[ByteRange], memory: memoryview) -> None:
        """Take `ranges` of `memory`, each of a tensor of the set `kind`."""

    def settle(self) -> None:
        """Return when the memory of earlier writes may change."""


def create(folder: Path, files: Iterable[TensorFile]) -> None:
    """Make the files with their headers, each of its full length. Raises OSError."""
    for file in files:
        with (folder / file.name).open("xb") as made:
            made.write(file.header)
            # Of full length at once, because ranks write their ranges in any order.
            made.truncate(file.nbytes)


class Writer:
    """Writes into the files `sets` (by set) that were created in `folder`.

    No call raises for the disk's sake but `finish`, so that a rank goes on to where all meet.
    """

    def __init__(self, folder: Path, sets: Mapping[str, Sequence[TensorFile]]) -> None:
        self._folder = folder
        self._placed: dict[Tensor, Placed] = {
            (kind, name): placed
            for kind, files in sets.items()
            for file in files
            for name, placed in file.tensors.items()
        }
        self._files: dict[str, int] = {}
        # Not an executor: the interpreter closes those before it waits for other threads.
        self._orders: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = Thread(target=self._obey, name="shardwise-checkpoint-writer")
        self._thread.start()
        self._parts: dict[Tensor, list[ChecksumPart]] = defaultdict(list)
        self._failure: BaseException | None = None

    def write(self, kind: str, ranges: Sequence[ByteRange], memory: memoryview) -> None:
        """Start to write `ranges` of `memory`, and sum them."""
        for each in ranges:
            tensor = kind, each.tensor
            data = memory[each.start : each.end]
            self._orders.put(partial(self._put, self._placed[tensor], each.at, data))
            # Summed here while the thread writes the same bytes: neither waits for the other.
            self._parts[tensor].append(ChecksumPart(each.at, len(data), zlib.crc32(data)))

    def settle(self) -> None:
        """Return when all that was given is in the page cache."""
        done = Event()
        # Orders are done in turn, so this one comes after every write before it.
        self._orders.put(done.set)
        done.wait()

    def finish(self) -> dict[Tensor, list[ChecksumPart]]:
        """Return when all of it is on the disk, with the sums. Raises OSError."""
        self.settle()
        if self._failure is None:
            # Each rank for itself: fsync of another host does not reach the pages of this one.
            for fd in self._files.values():
                os.fsync(fd)
        self.close()
        if self._failure is not None:
            raise self._failure
        return dict(self._parts)

    def close(self) -> None:
        """Let go of thread and files; may be called again."""
        self._orders.put(None)
        self._thread.join()
        while self._files:
            os.close(self._files.popitem()[1])

    def _obey(self) -> None:
        """Do what is ordered; after a failure nothing is written any more."""
        while (order := self._orders.get()) is not None:
            try:
                order()
            except BaseException as error:  # told by `finish`, on the thread that called
                self._failure = self._failure or error

    def _put(self, placed: Placed, at: int, data: memoryview) -> None:
        if self._failure is not None:
            return
        fd = self._files.get(placed.file)
        if fd is None:
            fd = self._files[placed.file] = os.open(
                self._folder / placed.file, os.O_WRONLY | os.O_CLOEXEC
            )
        offset = placed.begin + at
        assert offset + len(data) <= placed.end, "a rank keeps to its tensor"
        first = offset
        # pwrite may write less than it was given, as near the end of a quota.
        while data:
            written = os.pwrite(fd, data, offset)
            data, offset = data[written:], offset + written
        start = _sync_file_range()
        if start is not None and offset - first >= WORTH_STARTING:
            # The disk writes while the next ranges are summed. Only a hint: fsync comes at the end
            # anyway, and reports errors.
            start(fd, ctypes.c_int64(first), ctypes.c_int64(offset - first), _WRITE)


@cache
def _sync_file_range() -> Callable[..., int] | None:
    """Linux's call for it, which Python has no name for."""
    found: Callable[..., int] | None = getattr(ctypes.CDLL(None), "sync_file_range", None)
    return found


_WRITE = 2
"""SYNC_FILE_RANGE_WRITE: start, and do not wait."""
