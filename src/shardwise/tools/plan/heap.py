"""Simulates glibc's heap, so that memory of a rank on a CPU counts its gaps, as VmHWM does.

A rank that computes on the CPU keeps what it frees (`tiers.host_memory.keep`): blocks from 32 MB on
are mappings of their own, smaller ones come from one heap, by best fit, and pages that were used
once stay. torch asks for aligned memory, for which malloc needs some bytes more than a freed block
of the same size has: so a gradient rarely goes where the one before was.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Mapping

from shardwise.tiers.host_memory import MAPPED
from shardwise.tools.plan.choice import Choice
from shardwise.tools.plan.cpu_kernels import copied_bytes
from shardwise.tools.plan.layout import StateLayout
from shardwise.tools.plan.record import StepRecord, TensorLife

HEADER = 16
"""Bytes before a block that malloc keeps its size in."""

ALIGNED = 64 + 32
"""Bytes more that posix_memalign asks for, of an alignment of 64."""


class Heap:
    """Blocks by first and end; `peak` is the most bytes that were resident. `joins`: a freed block
    becomes one with its free neighbours."""

    def __init__(self, *, joins: bool = True) -> None:
        self._joins = joins
        self.top = 0
        self.mapped = 0
        self.peak = 0
        self._blocks: dict[object, tuple[int, int]] = {}
        self._free: list[tuple[int, int]] = []  # (size, first), rising
        self._ending: dict[int, int] = {}  # free blocks: by end, the first; by first, the end
        self._starting: dict[int, int] = {}

    def allocate(self, key: object, nbytes: int) -> None:
        """Take `nbytes` under `key`."""
        if nbytes >= MAPPED:
            self.mapped += nbytes
            self._blocks[key] = (-1, nbytes)
        else:
            self._blocks[key] = self._placed(nbytes + HEADER)
        self.peak = max(self.peak, self.top + self.mapped)

    def free(self, key: object) -> None:
        """Give back what `key` has."""
        first, end = self._blocks.pop(key)
        if first < 0:
            self.mapped -= end
            return
        before, after = self._ending.get(first), self._starting.get(end)
        if self._joins and before is not None:
            self._take(before, first)
            first = before
        if self._joins and after is not None:
            self._take(end, after)
            end = after
        self._put(first, end)

    def _placed(self, size: int) -> tuple[int, int]:
        """The best fitting free block, or the end of the heap."""
        place = bisect_left(self._free, (size + ALIGNED, 0))
        if place < len(self._free):
            whole, first = self._free[place]
            self._take(first, first + whole)
            if whole - size > ALIGNED:
                self._put(first + size, first + whole)
            return first, first + size
        first = self.top
        if (before := self._ending.get(self.top)) is not None:  # free up to the top: it grows
            self._take(before, self.top)
            first = before
        self.top = first + size
        return first, self.top

    def _put(self, first: int, end: int) -> None:
        insort(self._free, (end - first, first))
        self._ending[end], self._starting[first] = first, end

    def _take(self, first: int, end: int) -> None:
        self._free.remove((end - first, first))
        del self._ending[end], self._starting[first]


def bounds_on_cpu(
    record: StepRecord, choice: Choice, layout: StateLayout, rank: int
) -> tuple[int, int]:
    """Resident bytes of `rank` at the peak of two steps, from before the engine on, at least and at
    most: what the model took by then is counted, and where the engine has moved it."""
    low, high = Heap(), Heap(joins=False)
    for heap in (low, high):
        _replay(heap, record, choice, layout, rank)
    return low.peak, high.peak


def _replay(heap: Heap, record: StepRecord, choice: Choice, layout: StateLayout, rank: int) -> None:
    """Play the engine's start and two steps on `heap`."""
    for number, each in enumerate(record.parameters):
        heap.allocate(("parameter", number), each.nbytes)
    if record.buffer_bytes:
        heap.allocate("buffers", record.buffer_bytes)
    trained = [n for n, each in enumerate(record.parameters) if each.group >= 0]
    for number, bucket in enumerate(layout.buckets):
        sizes = layout.bucket_bytes(bucket, rank)
        heap.allocate(("values", number), sizes[0])
        for slot in bucket.layout.slots:
            heap.free(("parameter", trained[slot.parameter]))
    for number, bucket in enumerate(layout.buckets):
        heap.allocate(("gradient", number), layout.bucket_bytes(bucket, rank)[1])
    events = _events(record)
    reorders = {
        n: nbytes for n, each in enumerate(record.operations) if (nbytes := copied_bytes(each))
    }
    for step in range(2):
        for _ in range(choice.micro_batches):
            _play(heap, events, reorders)
        if step:
            break
        for number, bucket in enumerate(layout.buckets):
            assert bucket.group is not None
            count = len(bucket.group.moments) or 1
            nbytes = layout.bucket_bytes(bucket, rank)[2]
            for moment in range(count if nbytes else 0):
                heap.allocate(("state", number, moment), nbytes // count)


Events = dict[int, tuple[list[TensorLife], list[TensorLife]]]


def _events(record: StepRecord) -> Events:
    """By operation, the tensors that it makes, and those that end with it."""
    found: Events = defaultdict(lambda: ([], []))
    for life in record.tensors:
        found[life.born][0].append(life)
        found[life.died][1].append(life)
    return found


def _play(heap: Heap, events: Events, reorders: Mapping[int, int]) -> None:
    for number in sorted({*events, *reorders}):
        born, died = events.get(number, ((), ()))
        for life in born:
            heap.allocate(id(life), life.nbytes)
        if number in reorders:
            heap.allocate(number, reorders[number])
            heap.free(number)
        for life in died:
            heap.free(id(life))
