"""Allocates memory that other processes on this host can map.

A segment is an anonymous in-memory file (memfd) that is mapped completely. It has no name in any
file system, and its size is limited only by the host's memory. The kernel frees it when the last
process that maps it exits, even if that process is killed. When a tensor in a segment is
garbage-collected, its pages are returned to the system and its range can be reused.

A forked child must see the values at the time of the fork, and its writes must not reach its
parent. A shared mapping satisfies neither requirement, so there are two kinds of segments:

    forkable   tensors that user code sees: parameters. Before a fork they become private mappings
               of their file, which parent and child copy page by page as they write. The next step
               calls `share_again`, which gives the parent a new file that other ranks can read.
               The old file is freed when the last child that maps it exits.
    others     buffers of the engine, which a child never uses. They read as zeros in the child.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from collections import deque
from itertools import count
from weakref import WeakSet, finalize, ref

import torch
from torch import Tensor

from shardwise.errors import LaunchError
from shardwise.layout.extents import Extents

SMALLEST = 1 << 26
"""Size of the first segment in bytes. Pages that are never written use no memory."""

LARGEST = 1 << 30
"""Maximum size of a shared segment in bytes. Few large segments need few file descriptors."""

MAP_FIXED = 0x10
"""mmap(2): replace the mapping at exactly this address. Missing from Python's mmap module."""

MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
"""mmap(2): reserve no memory for pages that are never written. In Python's mmap module since 3.13.
"""

READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE

PROT_NONE = 0
"""mmap(2): no access at all. Missing from Python's mmap module."""

# The C library's mmap(2), because Python's mmap module cannot map at a given address. It is loaded
# at import time, because the first call may happen in a forked child of a process with threads.
_mmap = ctypes.CDLL(None, use_errno=True).mmap
_mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_mmap.restype = ctypes.c_size_t

_living: WeakSet[Arena] = WeakSet()

_mapped: WeakSet[mmap.mmap] = WeakSet()
"""Segments of other ranks that this process maps."""

_forking = threading.RLock()
"""Held while a process forks, and while segments change between shared and private."""


class Segment:
    """A piece of this process's shared memory, which exists until its last tensor is collected."""

    def __init__(self, number: int, fd: int, memory: mmap.mmap, *, forkable: bool) -> None:
        self.number = number
        self.fd = fd
        self.size = len(memory)
        self.start = _address(memory)
        self.is_forkable = forkable
        self.is_private = False
        """True if the process forked since the last `share_again`.

        Other ranks do not see writes then.
        """
        self._memory = ref(memory)
        self._owner = os.getpid()
        self.is_full = False
        """True if no further tensor may be allocated in this segment."""
        self.is_read = False
        """True if other ranks may still read memory that this rank frees."""
        self._extents = Extents()
        # Tensors may be garbage-collected at any time, even while `take` allocates. A deque needs
        # no lock.
        self._returned: deque[tuple[int, int, bool]] = deque()
        """Freed ranges (start, length), and whether the file may still hold values in that range.
        """

    def take(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        """Return a tensor of `numel` zeros, or None if the segment is full, private or unmapped."""
        memory = self._memory()
        if memory is None or self.is_full or self.is_private:
            return None
        self._collect_returned(memory)
        length = _pages(numel * dtype.itemsize)
        start = self._extents.take(length)
        if start + length > self.size:
            self._extents.give(start, length)
            return None
        piece = memoryview(memory)[start : start + length]
        finalize(piece, self._take_back, start, length).atexit = False
        return tensor_at(piece, 0, numel, dtype)

    def _take_back(self, start: int, length: int) -> None:
        """Free the pages of a garbage-collected tensor, so that they read as zeros."""
        # A forked child collects its tensors too, but the parent still uses the range.
        memory = self._memory()
        if memory is None or self.is_read or os.getpid() != self._owner:
            return
        in_file = self.is_private
        if not in_file:
            try:
                memory.madvise(mmap.MADV_REMOVE, start, length)
            except PermissionError:  # a fork in another thread has just made it private
                in_file = True
        if in_file:
            # Forked children still use the file, or `share` is copying values to a new one. So drop
            # only this process's pages.
            memory.madvise(mmap.MADV_DONTNEED, start, length)
        self._returned.append((start, length, in_file))

    def _collect_returned(self, memory: mmap.mmap) -> None:
        while self._returned:
            start, length, in_file = self._returned.popleft()
            if in_file and not self.is_private:
                memory.madvise(mmap.MADV_REMOVE, start, length)
            self._extents.give(start, length)

    def make_private(self) -> bool:
        """Hide this process's later writes from forked children and from other ranks.

        Returns False if the host does not allow private memory. The segment then stays shared. The
        kernel replaces the mapping atomically, so no write by another thread is lost.
        """
        memory = self._memory()  # held, so the mapping stays valid
        if memory is None or not self.is_forkable or self.is_private:
            return True
        try:
            _map_over(self.start, self.size, mmap.MAP_PRIVATE | MAP_NORESERVE, self.fd)
        except OSError:  # with vm.overcommit_memory=2 a private mapping counts in full
            # Kernels before 6.12 remove the old mapping before they reject the new one.
            _map_over(self.start, self.size, mmap.MAP_SHARED, self.fd)
            return False
        self.is_private = True
        return True

    def share(self, number: int) -> None:
        """Move a private segment to a new file, which other ranks can map as segment `number`.

        No-op if the segment is shared or its descriptor is closed. No thread may write to the
        segment during the call. Raises LaunchError if the host cannot provide the memory.
        """
        # Use a new file, because forked children still map the old one and would see values that
        # are written to it.
        memory = self._memory()
        if memory is None or not self.is_private or self.fd < 0:
            return
        self._collect_returned(memory)
        fd = _open_file(number, self.size)
        try:
            with memoryview(memory) as whole:
                for start, end in self._extents.used:
                    while start < end:  # one call writes 2 GB at most
                        start += os.pwrite(fd, whole[start:end], start)
            _map_over(self.start, self.size, mmap.MAP_SHARED, fd)
        except OSError as error:
            os.close(fd)
            raise _refusal(self.size, error) from error
        os.close(self.fd)
        self.number, self.fd, self.is_private = number, fd, False

    def leave_in_child(self) -> bool:
        """Close the segment's file in a forked child.

        A private segment retains its contents. A segment that is not forkable is filled with zeros.
        Returns False if a forkable segment could not be made private before the fork. Its memory
        can then no longer be accessed in the child.
        """
        memory, lost = self._memory(), self.is_forkable and not self.is_private
        if memory is not None and not self.is_private:
            _wipe(self.start, self.size, PROT_NONE if lost else READ_WRITE)
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        return memory is None or not lost

    @property
    def in_use(self) -> int:
        """Number of occupied bytes, including tensors whose memory is not yet reclaimed."""
        return self._extents.in_use

    def close(self) -> None:
        """Close the file descriptor. Tensors stay valid; forkable ones become private memory.

        If the host does not allow private memory, the descriptor stays open until the next fork,
        which tries again.
        """
        if self.fd >= 0 and self.make_private():
            os.close(self.fd)
            self.fd = -1


class Arena:
    """The segments of this process's shared memory."""

    def __init__(self) -> None:
        self._numbers = count(1)
        # A segment ends when its last tensor is collected, which can happen in any thread. So every
        # access to this dict is a single operation, which the GIL makes atomic, or works on a copy.
        self._segments: dict[int, Segment] = {}
        _living.add(self)

    def allocate(self, numel: int, dtype: torch.dtype, *, forkable: bool = False) -> Tensor:
        """Allocate a zeroed flat tensor of `numel` elements.

        If `forkable` is true, a forked child sees a copy of the tensor's values instead of zeros.
        Raises LaunchError if the host cannot provide the memory.
        """
        with _forking:  # a fork in another thread would make a new segment private immediately
            segments = [s for s in list(self._segments.values()) if s.is_forkable == forkable]
            for segment in segments:
                if (taken := segment.take(numel, dtype)) is not None:
                    return taken
            # Segments grow with the arena, because each needs a descriptor in every rank. Pages
            # that are never written use no memory.
            total = sum(segment.in_use for segment in segments)
            size = max(numel * dtype.itemsize, SMALLEST, min(total, LARGEST))
            segment, _held = self._open(size, forkable=forkable)
            taken = segment.take(numel, dtype)
        assert taken is not None
        return taken

    def allocate_alone(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Allocate a tensor in its own segment. Used if other ranks may map it for longer."""
        segment, memory = self._open(numel * dtype.itemsize)
        segment.is_full = True
        return tensor_at(memory, 0, numel, dtype)

    def locate(self, tensor: Tensor, *, written: bool = False) -> tuple[Segment, int] | None:
        """Return the tensor's segment and its offset in bytes, or None if it is in private memory.

        If `written` is true, other ranks must also see later writes. The result is then None for
        forkable memory, because a fork in another thread would hide the writes.
        """
        address = tensor.data_ptr()
        for segment in list(self._segments.values()):
            if segment.start <= address < segment.start + segment.size:
                is_hidden = segment.is_private or (written and segment.is_forkable)
                return None if is_hidden else (segment, address - segment.start)
        return None

    def holds(self, number: int) -> bool:
        """Return whether segment `number` still contains a tensor."""
        return number in self._segments

    def leave_to_others(self) -> None:
        """Stop reusing memory, because other ranks may still read it."""
        for segment in list(self._segments.values()):
            segment.is_read = segment.is_full = True

    def close(self) -> None:
        """Close the descriptors, so that no further process can map this memory.

        Tensors in it stay valid.
        """
        with _forking:
            for segment in list(self._segments.values()):
                segment.close()

    def make_private(self) -> None:
        """Make all segments private; see `Segment.make_private`."""
        for segment in list(self._segments.values()):
            segment.make_private()

    def share_again(self) -> None:
        """Share all private segments again; see `Segment.share`."""
        for before, segment in list(self._segments.items()):
            if segment.is_private:
                # Another thread may end the segment at any time. That removes the segment's current
                # number, so the new number must be registered before it is assigned to the segment.
                number = next(self._numbers)
                self._segments[number] = segment
                try:
                    segment.share(number)
                finally:
                    self._segments.pop(before if segment.number == number else number, None)

    def leave_in_child(self) -> bool:
        """Call `leave_in_child` on all segments, and return whether each call returned True."""
        kept = [segment.leave_in_child() for segment in list(self._segments.values())]
        return all(kept)

    def _open(self, size: int, *, forkable: bool = False) -> tuple[Segment, mmap.mmap]:
        """Create a segment, and return it with its memory.

        The caller must hold the returned memory until a tensor references it.
        """
        number, size = next(self._numbers), _pages(size)
        fd = _open_file(number, size)
        try:
            memory = _map_file(fd, size)
        except OSError as error:
            os.close(fd)
            raise _refusal(size, error) from error
        segment = self._segments[number] = Segment(number, fd, memory, forkable=forkable)
        finalize(memory, _end_segment, ref(self), segment).atexit = False
        return segment, memory


class MappedSegments:
    """Segments of other ranks that this process has mapped."""

    def __init__(self) -> None:
        self._open: dict[tuple[int, int], mmap.mmap] = {}

    def learn(self, rank: int, number: int, fd: int) -> None:
        """Map `rank`'s segment `number` from the descriptor `fd`, and close `fd`."""
        try:
            memory = self._open[rank, number] = _map_file(fd, os.fstat(fd).st_size)
            _mapped.add(memory)
        finally:
            os.close(fd)

    def forget(self, rank: int, number: int) -> None:
        """Drop segment `number`, which `rank` no longer uses. Tensors in it stay valid."""
        self._open.pop((rank, number), None)

    def view(self, rank: int, number: int, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a tensor over `rank`'s segment `number`, starting at byte `offset`."""
        return tensor_at(self._open[rank, number], offset, numel, dtype)

    def close(self) -> None:
        """Drop all segments. Tensors in them stay valid."""
        self._open.clear()


def tensor_at(
    memory: mmap.mmap | memoryview, offset: int, numel: int, dtype: torch.dtype
) -> Tensor:
    """Return a tensor over `memory`, starting at byte `offset`. It keeps `memory` alive."""
    if not numel:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=numel, offset=offset)


_LIMITS = {
    errno.EFBIG: "a limit on the size of files counts it: raise that (ulimit -f unlimited)",
    errno.EMFILE: "this process has too many files open: raise the limit (ulimit -n)",
    errno.ENOMEM: "the host's memory, or a limit on it (ulimit -v), is used up: use less",
}


def _refusal(size: int, error: OSError) -> LaunchError:
    hint = _LIMITS.get(error.errno or 0, "the system refuses it")
    return LaunchError(
        f"Cannot allocate {size:,} bytes of memory that ranks share ({error.strerror or error}): "
        f"{hint}, or run without shared memory: --transport gloo."
    )


def _end_segment(arena: ref[Arena], segment: Segment) -> None:
    # This is a function with a weak reference and not a method of the arena, because the finalizer
    # exists as long as any tensor in the segment and would keep the arena alive.
    segment.close()
    alive = arena()
    if alive is not None:
        alive._segments.pop(segment.number, None)


def _pages(size: int) -> int:
    """Round `size` up to whole pages, so that freeing a tensor frees all of its pages."""
    return -(-max(size, 1) // mmap.PAGESIZE) * mmap.PAGESIZE


def share_again() -> None:
    """Share all segments that became private in a fork.

    Called before parameters are updated. Between a fork and this call, transports copy such tensors
    to shared memory whenever they send them, which is slower.
    """
    with _forking:
        for arena in list(_living):
            arena.share_again()


def _open_file(number: int, size: int) -> int:
    try:
        fd = os.memfd_create(f"shardwise-{number}")
    except OSError as error:
        raise _refusal(size, error) from error
    try:
        os.ftruncate(fd, size)
    except OSError as error:
        os.close(fd)
        raise _refusal(size, error) from error
    return fd


def _map_file(fd: int, size: int) -> mmap.mmap:
    """Map the first `size` bytes of a file as shared memory.

    Raises OSError if the kernel rejects it.
    """
    # Python's mmap would hold a duplicate of `fd` until the mapping ends, and so keep a file alive
    # that was replaced after a fork. So create an anonymous mapping and map the file over it.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    memory = mmap.mmap(-1, size, flags=flags)
    _map_over(_address(memory), size, mmap.MAP_SHARED, fd)
    return memory


def _address(memory: mmap.mmap) -> int:
    return tensor_at(memory, 0, 1, torch.uint8).data_ptr()


def _map_over(start: int, size: int, flags: int, fd: int = -1, access: int = READ_WRITE) -> None:
    """Replace the mapping of `size` bytes at `start`. Raises OSError if the kernel rejects it."""
    if _mmap(start, size, access, flags | MAP_FIXED, fd, 0) != start:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _wipe(start: int, size: int, access: int = READ_WRITE) -> None:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    _map_over(start, size, flags, access=access)


def _before_fork() -> None:
    # Parent and child release the lock after the fork. No thread may open or share a segment
    # meanwhile.
    _forking.acquire()
    for arena in list(_living):
        arena.make_private()


def _in_forked_child() -> None:
    try:
        kept = [arena.leave_in_child() for arena in list(_living)]
        if not all(kept):
            os.write(2, _no_parameters().encode())  # another thread may hold the lock of sys.stderr
        for memory in list(_mapped):
            _wipe(_address(memory), len(memory))
    finally:
        _forking.release()


def _no_parameters() -> str:
    return (
        f"shardwise: process {os.getpid()} was forked without the model's parameters, because the "
        "host refuses private memory for them (vm.overcommit_memory=2, or a limit on memory). It "
        "will crash with a segmentation fault if it uses them. Give the host more memory or swap, "
        "or run with --transport gloo.\n"
    )


os.register_at_fork(
    before=_before_fork, after_in_parent=_forking.release, after_in_child=_in_forked_child
)
