"""The buckets that are in a collective, in launch order, and the buffers that they borrow.

borrow ─▶ push ─▶ all-reduce or reduce-scatter, in parallel with backward ─▶ drain
   ▲                                                                           │
   └────────────────── give_back, reused once no rank reads the buffer ◀───────┘
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from shardwise.comm import Collectives, Handle, Sum
from shardwise.states.gradients.bucket_views import BucketViews
from shardwise.states.storage.storage_factory import TensorKind

IN_FLIGHT = 2
"""Number of borrowed buffers that may be in a collective at once. Beyond that, `borrow` waits for
the oldest."""

LAG = 1
"""A bucket is summed (and the second half of its all-reduce started) this many launches later. Its
parts have most likely arrived from all ranks by that time, so the rank does not wait."""


@dataclass(eq=False)
class Buffer:
    """Flat memory for the gradients of a bucket: permanently, or borrowed."""

    memory: Tensor
    """(numel,) of its bucket, or of the longest bucket that may borrow it."""
    readers: Sequence[Handle] = ()
    """Collectives and copies that may still read it, after it was given back."""
    views: dict[tuple[int, bool], BucketViews] = field(default_factory=dict)
    """Views, by the index of a bucket and by whether this rank's interval is in separate memory.
    They are cached, because making a view costs more than copying a small gradient."""

    def reusable(self) -> None:
        """Wait until the memory may be overwritten."""
        for handle in self.readers:
            handle.reusable()


@dataclass(frozen=True, eq=False)
class Launch:
    """One collective of a bucket."""

    bucket: int
    """Number of the bucket."""
    settle: Callable[[Launch], None]
    """Waits for the sum and adds it to the sum of the step."""
    buffer: Buffer
    handle: Handle
    in_place: bool
    """Whether the sum is already in its final memory."""
    is_borrowed: bool
    """Whether the buffer goes back to the queue."""


class ReductionQueue:
    """Keeps the launch order of one rank's buckets, and lends them buffers.

    Gradients are reduced over the ranks of `group`, by reduce-scatter if `scatters`, else by
    all-reduce. `lengths` has by dtype and device the number of elements of the longest bucket.
    """

    def __init__(
        self,
        group: Collectives,
        how: Sum,
        lengths: Mapping[TensorKind, int],
        *,
        scatters: bool,
    ) -> None:
        self.group = group
        self.rank = group.rank
        self.how = how
        self.scatters = scatters
        self.patient = True
        """Whether this rank may wait for a sum while its backward runs.

        False if backward also waits for other ranks elsewhere, as synchronised BatchNorm does. If
        ranks use different parameters, one could wait in BatchNorm for a rank that waits here for
        the bucket of the first: a deadlock.
        """
        self._lengths = lengths
        self._launches: deque[Launch] = deque()
        self._spare: dict[TensorKind, deque[Buffer]] = {kind: deque() for kind in lengths}
        self._out = self._most_out = 0

    def push(self, launch: Launch) -> None:
        """Append a started collective."""
        self._launches.append(launch)
        # Only now sum the bucket before it: right after its launch the ranks would have waited.
        if len(self._launches) > LAG and (self.patient or self.group.looks):
            self._launches[-1 - LAG].handle.advance()

    def drain(self) -> Iterator[int]:
        """Wait for all launches; yield each bucket's number once its sum is complete."""
        # Advance all before waiting for one: another rank may wait for a later one.
        for launch in self._launches:
            launch.handle.advance()
        while self._launches:
            launch = self._launches.popleft()
            launch.settle(launch)
            yield launch.bucket

    def borrow(self, kind: TensorKind) -> Buffer:
        """Return a buffer with arbitrary content, at least as long as every bucket of `kind`."""
        while sum(launch.is_borrowed for launch in self._launches) >= IN_FLIGHT:
            if not (self.patient or self._launches[0].handle.is_there()):
                break  # allocate another buffer instead of waiting
            launch = self._launches.popleft()
            launch.settle(launch)
        spare = self._spare[kind]
        if not spare:
            spare.append(Buffer(self.group.allocate(self._lengths[kind], *kind)))
        # Counted for `trim`: the most buffers that were out at once in this step.
        self._out += 1
        self._most_out = max(self._out, self._most_out)
        # First in, first out: other ranks are most likely still reading the last returned buffer.
        buffer = spare.popleft()
        buffer.reusable()
        buffer.readers = ()  # the handles would keep the collective's memory alive
        return buffer

    def give_back(self, buffer: Buffer, readers: Sequence[Handle]) -> None:
        """Take back a borrowed buffer; `readers` are the collective and the copy that read it."""
        self._out -= 1
        buffer.readers = readers
        self._spare[buffer.memory.dtype, buffer.memory.device].append(buffer)

    def trim(self) -> None:
        """Free spare buffers beyond the number that this step borrowed at once.

        The first step needs more than later ones.
        """
        for spare in self._spare.values():
            while len(spare) > max(self._most_out, IN_FLIGHT):
                spare.popleft().reusable()
        self._most_out = self._out

    def forget_views(self) -> None:
        """Drop all views, which would keep the memory of replaced sums alive."""
        for spare in self._spare.values():
            for buffer in spare:
                buffer.views.clear()
