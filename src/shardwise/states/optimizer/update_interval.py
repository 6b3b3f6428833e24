"""Cuts the interval of a bucket that a rank updates into the segments that an optimizer sees.

interval      |  a  |  b   |    c     |   d   |      segments: tensors that it updates
spans         |         0         |     1     |      what is in memory at a time
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, optim

from shardwise.layout.bucket_layout import Bucket, Slot, Span
from shardwise.states.gradients.bucket import GradientBucket
from shardwise.states.storage.host_storage import HostCopy
from shardwise.states.storage.storage import Storage


@dataclass(eq=False)
class UpdateSegment:
    """Elements [first, end) of an interval (counted in the bucket), updated as one tensor."""

    first: int
    end: int
    pieces: list[Slot]
    tensor: Tensor
    master: Tensor | None = None
    """What `tensor`, the user's parameter, holds during an update in place of its 16 bits, or of
    what it has on the device: where the user's own optimizer updates."""


@dataclass(eq=False)
class UpdateInterval:
    """What this rank updates of one bucket: parameters, masters and optimizer state."""

    bucket: Bucket
    own: Span
    target: Storage
    """The parameters, elements `own` of the bucket."""
    master: Storage
    """What the optimizer updates: `target` itself, or its master."""
    moments: dict[str, Storage]
    """By key, the optimizer's state where it rests on a disk."""
    spans: Sequence[Span]
    """Parts that are in memory at a time, counted from the interval's start."""
    gradient: GradientBucket
    """Holds the reduced gradient of the elements `own`."""
    segments: list[UpdateSegment] = field(default_factory=list)
    host_copy: HostCopy | None = None
    """Brings the gradient to the master, if only the latter is on the host."""

    def segment(self, pieces: list[Slot]) -> UpdateSegment:
        """A segment of neighbours, as one flat tensor, up to a whole grain."""
        first, grain = pieces[0].start, self.bucket.grain
        end = min(-(-pieces[-1].end // grain) * grain, self.own[1])
        return UpdateSegment(first, end, pieces, self.flat(first, end))

    def flat(self, first: int, end: int) -> Tensor:
        """Elements of the master, counted in the bucket; without memory while it is on a disk."""
        if (memory := self.master.memory) is not None:
            return memory[first - self.own[0] : end - self.own[0]]
        return without_memory(end - first, self.master.dtype)

    def within(self, span: Span) -> list[UpdateSegment]:
        """The segments that lie in a span; none crosses its borders."""
        first, end = self.own[0] + span[0], self.own[0] + span[1]
        return [s for s in self.segments if first <= s.first < end]

    @property
    def in_memory(self) -> bool:
        """Whether all that an update needs is in the memory of the device, for good."""
        states = (self.target, self.master, self.gradient.reduced)
        return not self.moments and all(
            state.memory is not None and state.copy_stream is None and len(state.spans) == 1
            for state in states
        )

    @property
    def has_master(self) -> bool:
        """Whether the optimizer updates a master in place of the parameters."""
        return self.master is not self.target

    @property
    def pieces(self) -> list[list[Slot]]:
        """What lies in the interval, by span."""
        start = self.own[0]
        return [self.bucket.pieces(start + first, start + end) for first, end in self.spans]

    @property
    def all_pieces(self) -> list[Slot]:
        """The same in one list."""
        return [piece for pieces in self.pieces for piece in pieces]


@cache
def _nothing(dtype: torch.dtype) -> Tensor:
    return torch.zeros((), dtype=dtype)


def without_memory(numel: int, dtype: torch.dtype) -> Tensor:
    """A flat tensor of `numel` elements that stands in for what is on a disk."""
    return _nothing(dtype).expand(numel)


def has_no_memory(tensor: Tensor) -> bool:
    """Whether `tensor` is such a stand-in."""
    return tensor.data_ptr() == _nothing(tensor.dtype).data_ptr()


def runs(pieces: Sequence[Slot], mark: Callable[[Slot], Any]) -> list[list[Slot]]:
    """Consecutive pieces of equal mark, together."""
    found: list[list[Slot]] = []
    before: Any = object()
    for piece in pieces:
        now = mark(piece)
        if now != before:
            found.append([])
        found[-1].append(piece)
        before = now
    return found


def copied(value: Any) -> Any:
    """`value`, sharing no memory with it."""
    return value.clone() if isinstance(value, Tensor) else value


def cut_by_use(inner: optim.Optimizer, interval: UpdateInterval, used: Sequence[bool]) -> bool:
    """Cut the segments of `interval` where used and unused parameters meet, their state in `inner`
    with them; return whether there was one.

    So an unused parameter keeps its value, its moments and its step count, as with `grad=None` in
    torch.
    """
    found: list[UpdateSegment] = []
    for segment in interval.segments:
        parts = runs(segment.pieces, lambda piece: used[piece.parameter])
        if len(parts) < 2:
            found.append(segment)
            continue
        state: dict[str, Any] | None = inner.state.pop(segment.tensor, None)
        for pieces in parts:
            child = interval.segment(pieces)
            found.append(child)
            if state:
                a, b = child.first - segment.first, child.end - segment.first
                # Tensors of the segment's form are cut; everything else is copied to each part.
                inner.state[child.tensor] = {
                    key: value[a:b]
                    if isinstance(value, Tensor) and value.shape == segment.tensor.shape
                    else copied(value)
                    for key, value in state.items()
                }
    is_cut = len(found) != len(interval.segments)
    interval.segments = found
    return is_cut
