"""Queues the buckets whose collective is in flight, in launch order, and lends them buffers.

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
"""Maximum number of borrowed buffers in flight. Beyond it, `borrow` waits for the oldest one."""

COPIED = 1
"""Number of further buffers if sums are copied to another tier. Without them, the backward pass
would wait for every copy, because the copy starts only when a later bucket needs a buffer."""

LAG = 1
"""Number of launches after which a bucket is summed (and the second half of its all-reduce
started). By that time its parts have most likely arrived from all ranks, so this rank does not
wait."""


@dataclass(eq=False)
class Buffer:
    """Flat memory for a bucket's gradients, either permanent or borrowed."""

    memory: Tensor
    """Shape (numel,) of its bucket, or of the longest bucket that may borrow it."""
    readers: Sequence[Handle] = ()
    """Collectives and copies that may still read the buffer after it was given back."""
    views: dict[tuple[int, bool], BucketViews] = field(default_factory=dict)
    """Views, by bucket index and by whether this rank's interval is in separate memory. They are
    cached, because creating a view costs more than copying a small gradient."""

    def reusable(self) -> None:
        """Wait until the memory may be overwritten."""
        for handle in self.readers:
            handle.reusable()


@dataclass(frozen=True, eq=False)
class Launch:
    """A launched collective that reduces a bucket."""

    bucket: int
    """Index of the bucket."""
    settle: Callable[[Launch], None]
    """Waits for the sum and adds it to the step's sum."""
    buffer: Buffer
    handle: Handle
    in_place: bool
    """True if the sum is already in its final memory."""
    is_borrowed: bool
    """True if the buffer must be returned to the queue."""


class ReductionQueue:
    """Tracks the order in which this rank launched its buckets, and lends them buffers.

    Gradients are reduced across the ranks of `group`: by reduce-scatter if `scatters` is true,
    otherwise by all-reduce. `lengths` gives the number of elements of the longest bucket for each
    dtype and device. `copies` is true if sums are copied from the buffers to another tier while the
    backward pass continues.
    """

    def __init__(
        self,
        group: Collectives,
        how: Sum,
        lengths: Mapping[TensorKind, int],
        *,
        scatters: bool,
        copies: bool = False,
    ) -> None:
        self.group = group
        self.rank = group.rank
        self.how = how
        self.scatters = scatters
        self.patient = True
        """Whether this rank may wait for a sum while its backward pass runs.

        False if the backward pass also waits for other ranks elsewhere, as synchronised BatchNorm
        does. If ranks use different parameters, waiting could deadlock: one rank waits in BatchNorm
        for a second one, which waits here for the first rank's bucket.
        """
        self._lengths = lengths
        self._copied = COPIED if copies else 0
        self._launches: deque[Launch] = deque()
        self._spare: dict[TensorKind, deque[Buffer]] = {kind: deque() for kind in lengths}
        self._out = self._most_out = 0

    def push(self, launch: Launch) -> None:
        """Append a launch, and continue the work of an earlier launch."""
        self._launches.append(launch)
        # Advance the previous bucket only now. Right after its launch, this rank would have waited
        # for the others.
        if len(self._launches) > LAG and (self.patient or self.group.looks):
            self._launches[-1 - LAG].handle.advance()

    def drain(self) -> Iterator[int]:
        """Wait for all launches. Yield each bucket's index once its sum is complete."""
        self.advance()
        while self._launches:
            launch = self._launches.popleft()
            launch.settle(launch)
            yield launch.bucket

    def advance(self) -> None:
        """Advance all launches. Call before waiting for one: other ranks may need a later one."""
        for launch in self._launches:
            launch.handle.advance()

    def borrow(self, kind: TensorKind) -> Buffer:
        """Return a buffer with arbitrary content, at least as long as every bucket of `kind`."""
        while sum(launch.is_borrowed for launch in self._launches) >= IN_FLIGHT:
            if not (self.patient or self._launches[0].handle.is_there()):
                break  # allocate another buffer instead of waiting
            launch = self._launches.popleft()
            launch.settle(launch)
        spare = self._spare[kind]
        # Leave the last returned buffers alone, because their sums are being copied. At the end of
        # the queue they are taken once the copy has had the time of one more bucket.
        if len(spare) <= self._copied:
            spare.appendleft(Buffer(self.group.allocate(self._lengths[kind], *kind)))
        # `trim` needs the maximum number of buffers lent at once in this step.
        self._out += 1
        self._most_out = max(self._out, self._most_out)
        # First in, first out: other ranks are most likely still reading the last returned buffer.
        buffer = spare.popleft()
        buffer.reusable()
        buffer.readers = ()  # the handles would keep the collective's memory alive
        return buffer

    def give_back(self, buffer: Buffer, readers: Sequence[Handle]) -> None:
        """Take back a borrowed buffer, which `readers` (a collective and a copy) may still read."""
        self._out -= 1
        buffer.readers = readers
        self._spare[buffer.memory.dtype, buffer.memory.device].append(buffer)

    def trim(self) -> None:
        """Free spare buffers beyond the largest number that this step borrowed at the same time.

        The first step needs more buffers than later ones.
        """
        for spare in self._spare.values():
            while len(spare) > max(self._most_out, IN_FLIGHT) + self._copied:
                spare.popleft().reusable()
        self._most_out = self._out

    def forget_calls(self) -> None:
        """Discard all launches, because their transport no longer exists."""
        self._launches.clear()
        # Buffers that were lent are dropped with their launches, and allocated again.
        self._out = self._most_out = 0
        for spare in self._spare.values():
            for buffer in spare:
                buffer.readers = ()

    def forget_views(self) -> None:
        """Drop all views, which would keep the memory of replaced sums alive."""
        for spare in self._spare.values():
            for buffer in spare:
                buffer.views.clear()
