"""The buckets that are in a collective, in launch order, and the buffers that they borrow.

borrow ─▶ push ─▶ all-reduce or reduce-scatter, in parallel with backward ─▶ drain
   ▲                                                                           │
   └────────────────── give_back, reused once nobody reads the buffer ◀────────┘
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
"""Borrowed buffers that may be in a collective at once; the oldest is waited for beyond that."""

LAG = 1
"""How many buckets later a received bucket is summed (and an all-reduce's second half starts): by
then it has most likely arrived from all ranks, so that nobody waits."""


@dataclass(eq=False)
class Buffer:
    """Flat memory that gradients are collected in: a bucket's own, or borrowed."""

    memory: Tensor
    """(numel,) of its bucket, or of the longest bucket that may borrow it."""
    readers: Sequence[Handle] = ()
    """Who may still read it, after it was given back."""
    views: dict[tuple[int, bool], BucketViews] = field(default_factory=dict)
    """By index of the bucket in it, and whether its own interval is elsewhere. They are kept as
    long as the buffer: making a view costs more than copying a small gradient."""

    def reusable(self) -> None:
        """Return when it may be written."""
        for handle in self.readers:
            handle.reusable()


@dataclass(frozen=True, eq=False)
class Launch:
    """One collective of the bucket with number `bucket`, whose `settle` takes in the sum.

    `in_place`: the sum needs no copy.
    """

    bucket: int
    settle: Callable[[Launch], None]
    buffer: Buffer
    handle: Handle
    in_place: bool
    is_borrowed: bool


class ReductionQueue:
    """Keeps the launch order of the buckets of one rank, and lends them buffers.

    `group` are the ranks to reduce over. `scatters`: reduce-scatter, not all-reduce. `lengths` has
    by dtype and device the elements of the longest bucket.
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

        Not if backward also waits for other ranks elsewhere, as synchronised BatchNorm does. A rank
        that has not used the same parameters would wait in BatchNorm for a rank that waits here for
        its bucket: a deadlock.
        """
        self._lengths = lengths
        self._launches: deque[Launch] = deque()
        self._spare: dict[TensorKind, deque[Buffer]] = {kind: deque() for kind in lengths}
        self._out = self._most_out = 0

    def push(self, launch: Launch) -> None:
        """Append a collective that was started."""
        self._launches.append(launch)
        # The sum of the bucket before is made only now: asked for at once, ranks would wait.
        if len(self._launches) > LAG and (self.patient or self.group.looks):
            self._launches[-1 - LAG].handle.advance()

    def drain(self) -> Iterator[int]:
        """Wait for everything that was launched; yields each bucket's number once its sum is
        there."""
        # All are advanced before one is waited for: another rank may wait for a later one.
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
                break  # another buffer instead
            launch = self._launches.popleft()
            launch.settle(launch)
        spare = self._spare[kind]
        if not spare:
            spare.append(Buffer(self.group.allocate(self._lengths[kind], *kind)))
        self._out += 1
        self._most_out = max(self._out, self._most_out)
        # First in, first out: others read the last returned buffer for longest.
        buffer = spare.popleft()
        buffer.reusable()
        buffer.readers = ()  # or the handles would keep the collective's memory alive
        return buffer

    def give_back(self, buffer: Buffer, readers: Sequence[Handle]) -> None:
        """Take back what `borrow` gave; `readers` are the collective and the copy it was in."""
        self._out -= 1
        buffer.readers = readers
        self._spare[buffer.memory.dtype, buffer.memory.device].append(buffer)

    def trim(self) -> None:
        """Keep as many buffers as this step had out at once: the first needs more than others."""
        for spare in self._spare.values():
            while len(spare) > max(self._most_out, IN_FLIGHT):
                spare.popleft().reusable()
        self._most_out = self._out

    def forget_views(self) -> None:
        """Drop all views: they would keep memory alive that sums are no longer in."""
        for spare in self._spare.values():
            for buffer in spare:
                buffer.views.clear()
