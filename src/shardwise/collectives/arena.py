"""Allocates memory that other processes of this host can map.

A segment is an anonymous file in memory (memfd) that is mapped whole. It has no name in any file
system and no limit but the host's memory, and it is gone when the last process that maps it has
ended, however that ended. What a tensor in it took is the system's again when the tensor is
collected, and free for another one.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections import deque
from itertools import count
from weakref import WeakSet, finalize, ref

import torch
from torch import Tensor

from shardwise.errors import LaunchError
from shardwise.extents import Extents

SMALLEST = 1 << 26
"""Bytes of the first segment; what is never written of it takes no memory."""

LARGEST = 1 << 30
"""Bytes up to which segments grow with the arena, so that they stay few: each needs descriptors."""

_living: WeakSet[Arena] = WeakSet()


class Segment:
    """A piece of this process's shared memory; it lives as long as any tensor in it."""

    def __init__(self, number: int, fd: int, memory: mmap.mmap) -> None:
        self.number = number
        self.fd = fd
        self.size = len(memory)
        self.start = tensor_at(memory, 0, 1, torch.uint8).data_ptr()
        self._memory = ref(memory)
        self._owner = os.getpid()
        self.is_full = False
        """Whether nothing more shall be taken of it."""
        self.is_read = False
        """Whether other ranks may go on reading what this one lets go."""
        self._extents = Extents()
        # Tensors are collected at any time, also while ranges are being taken.
        self._returned: deque[tuple[int, int]] = deque()

    def take(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        """`numel` zeros; None when there is no room for them, or the segment has ended."""
        memory = self._memory()
        if memory is None or self.is_full:
            return None
        while self._returned:
            self._extents.give(*self._returned.popleft())
        length = _pages(numel * dtype.itemsize)
        start = self._extents.take(length)
        if start + length > self.size:
            self._extents.give(start, length)
            return None
        piece = memoryview(memory)[start : start + length]
        finalize(piece, self._take_back, start, length).atexit = False
        return tensor_at(piece, 0, numel, dtype)

    def _take_back(self, start: int, length: int) -> None:
        """Nobody holds this range any more: its pages go, and read as zeros when used again.

        A forked process lets go of its copy only.
        """
        memory = self._memory()
        if memory is not None and not self.is_read and os.getpid() == self._owner:
            memory.madvise(mmap.MADV_REMOVE, start, length)
            self._returned.append((start, length))

    @property
    def in_use(self) -> int:
        """Bytes that tensors lie in, or lay in until just now."""
        return self._extents.in_use

    def close(self) -> None:
        """Close the descriptor; tensors in the segment stay."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


class Arena:
    """The shared memory of this process: tensors laid end to end in segments."""

    def __init__(self) -> None:
        self._numbers = count(1)
        # A segment ends where the last tensor in it is collected, which may be in any thread:
        # single operations on this dict cannot be torn.
        self._segments: dict[int, Segment] = {}
        _living.add(self)

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A zeroed flat tensor of `numel` elements. Raises LaunchError when the host refuses it."""
        segments = list(self._segments.values())
        for segment in segments:
            if (taken := segment.take(numel, dtype)) is not None:
                return taken
        total = sum(segment.in_use for segment in segments)
        size = max(numel * dtype.itemsize, SMALLEST, min(total, LARGEST))
        segment, _held = self._open(size)
        taken = segment.take(numel, dtype)
        assert taken is not None
        return taken

    def alone(self, numel: int, dtype: torch.dtype) -> Tensor:
        """The same, in a segment of its own, where others may use it for longer than this rank."""
        segment, memory = self._open(numel * dtype.itemsize)
        segment.is_full = True
        return tensor_at(memory, 0, numel, dtype)

    def locate(self, tensor: Tensor) -> tuple[Segment, int] | None:
        """The segment that `tensor` lies in, and the bytes before it; None for private memory."""
        address = tensor.data_ptr()
        for segment in list(self._segments.values()):
            if segment.start <= address < segment.start + segment.size:
                return segment, address - segment.start
        return None

    def holds(self, number: int) -> bool:
        """Whether any tensor still lies in segment `number`."""
        return number in self._segments

    def leave_to_others(self) -> None:
        """This rank goes while others may still read: what lies here now is never freed or used
        again; it goes with the segment."""
        for segment in list(self._segments.values()):
            segment.is_read = segment.is_full = True

    def close(self) -> None:
        """Close the descriptors: nobody new can map this memory. Tensors in it stay."""
        for segment in list(self._segments.values()):
            segment.close()

    def _open(self, size: int) -> tuple[Segment, mmap.mmap]:
        """A new segment, and its memory, which must be held until a tensor in it holds it."""
        number, size = next(self._numbers), _pages(size)
        try:
            fd = os.memfd_create(f"shardwise-{number}")
        except OSError as error:
            raise _refused(size, error) from error
        try:
            os.ftruncate(fd, size)
            memory = mmap.mmap(fd, size)
        except OSError as error:
            os.close(fd)
            raise _refused(size, error) from error
        segment = self._segments[number] = Segment(number, fd, memory)
        finalize(memory, _end, ref(self), segment).atexit = False
        return segment, memory


class MappedSegments:
    """The segments of the other ranks, mapped when their descriptors come."""

    def __init__(self) -> None:
        self._open: dict[tuple[int, int], mmap.mmap] = {}

    def learn(self, rank: int, number: int, fd: int) -> None:
        """Map the segment `number` of `rank`, whose descriptor is `fd`, and close that."""
        try:
            self._open[rank, number] = mmap.mmap(fd, os.fstat(fd).st_size)
        finally:
            os.close(fd)

    def forget(self, rank: int, number: int) -> None:
        """Let go of a segment that its owner no longer uses; tensors in it stay."""
        self._open.pop((rank, number), None)

    def view(self, rank: int, number: int, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
        """`numel` elements of `rank`'s memory, from byte `offset` of its segment `number` on."""
        return tensor_at(self._open[rank, number], offset, numel, dtype)

    def close(self) -> None:
        """Let go of all."""
        self._open.clear()


def tensor_at(
    memory: mmap.mmap | memoryview, offset: int, numel: int, dtype: torch.dtype
) -> Tensor:
    """The `numel` elements from byte `offset` of `memory` on, which they keep alive."""
    if not numel:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=numel, offset=offset)


_LIMITS = {
    errno.EFBIG: "a limit on the size of files counts it: raise that (ulimit -f unlimited)",
    errno.EMFILE: "this process has too many files open: raise the limit (ulimit -n)",
    errno.ENOMEM: "the host's memory, or a limit on it (ulimit -v), is used up: use less",
}


def _refused(size: int, error: OSError) -> LaunchError:
    hint = _LIMITS.get(error.errno or 0, "the system refuses it")
    return LaunchError(
        f"{size:,} bytes of memory that ranks share cannot be had ({error.strerror or error}): "
        f"{hint}, or do without it: --transport gloo."
    )


def _end(arena: ref[Arena], segment: Segment) -> None:
    segment.close()
    alive = arena()
    if alive is not None:
        alive._segments.pop(segment.number, None)


def _pages(size: int) -> int:
    """`size` up to whole pages: so tensors start on one, and share none."""
    return -(-max(size, 1) // mmap.PAGESIZE) * mmap.PAGESIZE


def _in_forked_child() -> None:
    """A forked DataLoader worker needs no descriptors of ours."""
    for arena in list(_living):
        arena.close()


os.register_at_fork(after_in_child=_in_forked_child)
