"""The interval of a bucket that this rank updates, divided into segments for an optimizer.

interval      |  a  |  b   |    c     |   d   |      segments: the tensors that it updates
spans         |         0         |     1     |      the pieces that are loaded one at a time
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby
from typing import Any, Protocol

import torch
from torch import Tensor, nn, optim

from shardwise.layout.bucket_layout import Bucket, Slot, Span
from shardwise.states.storage.host_storage import HostCopy
from shardwise.states.storage.storage import Storage


class ReducedGradient(Protocol):
    """A bucket's reduced gradient, for the elements that a rank updates."""

    own: Span
    """The elements of the bucket that the rank updates."""

    @property
    def reduced(self) -> Storage:
        """The reduced gradient of the elements `own`."""


@dataclass(eq=False)
class UpdatedTensor:
    """Elements [first, end) of a bucket, which an optimizer updates as a single tensor."""

    first: int
    end: int
    pieces: list[Slot]
    """The parameters, or parts of them, that the segment covers."""
    tensor: Tensor
    """The tensor in the optimizer's parameter group: (end - first,), or the parameter's shape if
    the optimizer needs full tensors."""
    master: Tensor | None = None
    """The master of `tensor`, if `tensor` is the user's own parameter and either has a 16-bit dtype
    or is on a different device. `tensor` holds the master's values during an update."""
    parameter: nn.Parameter | None = None
    """The parameter, if the optimizer needs full tensors."""


@dataclass(eq=False)
class BucketUpdate:
    """The interval of a bucket that this rank updates, with the storage of its states."""

    bucket: Bucket
    own: Span
    target: Storage
    """The parameters: elements `own` of the bucket."""
    master: Storage
    """The values that the optimizer updates: `target` itself, or its master."""
    moments: dict[str, Storage]
    """State entry -> its storage, if the optimizer's state is on a disk or quantised."""
    spans: Sequence[Span]
    """The pieces that are loaded into memory one at a time, in elements of the interval."""
    gradient: ReducedGradient
    """Holds the reduced gradient of the elements `own`."""
    segments: list[UpdatedTensor] = field(default_factory=list)
    host_copy: HostCopy | None = None
    """A copy of the gradient on the host, if the master is there and the gradient is not."""

    def segment(self, pieces: list[Slot]) -> UpdatedTensor:
        """Return a flat segment that consists of neighbouring pieces."""
        first, grain = pieces[0].start, self.bucket.grain
        # Round up to a full grain: an exact sum must not split it, and the gap is otherwise unused.
        end = min(-(-pieces[-1].end // grain) * grain, self.own[1])
        return UpdatedTensor(first, end, pieces, self.flat(first, end))

    def flat(self, first: int, end: int) -> Tensor:
        """Return elements [first, end) of the bucket from the master.

        The result has no storage if the master is on a disk.
        """
        if (memory := self.master.memory) is not None:
            return memory[first - self.own[0] : end - self.own[0]]
        return without_memory(end - first, self.master.dtype)

    def within(self, span: Span) -> list[UpdatedTensor]:
        """Return the segments in `span`. No segment crosses a span boundary."""
        first, end = self.own[0] + span[0], self.own[0] + span[1]
        return [s for s in self.segments if first <= s.first < end]

    @property
    def in_memory(self) -> bool:
        """True if everything that an update needs is always in the device's memory."""
        states = (self.target, self.master, self.gradient.reduced)
        return not self.moments and all(
            state.memory is not None and state.copy_stream is None and len(state.spans) == 1
            for state in states
        )

    @property
    def has_master(self) -> bool:
        """True if the optimizer updates a master instead of the parameters."""
        return self.master is not self.target

    @property
    def pieces(self) -> list[list[Slot]]:
        """The parts of parameters in each span."""
        start = self.own[0]
        return [self.bucket.pieces(start + first, start + end) for first, end in self.spans]

    @property
    def all_pieces(self) -> list[Slot]:
        """The parts of parameters in the interval."""
        return [piece for pieces in self.pieces for piece in pieces]


# One element per dtype, expanded to any length. Its address identifies tensors without memory.
@cache
def _nothing(dtype: torch.dtype) -> Tensor:
    return torch.zeros((), dtype=dtype)


def without_memory(numel: int, dtype: torch.dtype) -> Tensor:
    """Return a flat placeholder of `numel` elements for data that is in a `Storage`."""
    return _nothing(dtype).expand(numel)


def has_no_memory(tensor: Tensor) -> bool:
    """Return whether `tensor` was created by `without_memory`."""
    return tensor.data_ptr() == _nothing(tensor.dtype).data_ptr()


def group_consecutive(pieces: Sequence[Slot], mark: Callable[[Slot], Any]) -> list[list[Slot]]:
    """Split `pieces` into runs for which `mark` returns equal values."""
    return [list(run) for _, run in groupby(pieces, mark)]


def copy_value(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def cut_by_use(inner: optim.Optimizer, interval: BucketUpdate, used: Sequence[bool]) -> bool:
    """Split segments of `interval`, and their state in `inner`, between used and unused parameters.

    The update then leaves an unused parameter's value, moments and step count unchanged, as torch
    does if `grad` is None. Returns whether any segment was split.
    """
    segments: list[UpdatedTensor] = []
    for segment in interval.segments:
        parts = group_consecutive(segment.pieces, lambda piece: used[piece.parameter])
        if len(parts) < 2:
            segments.append(segment)
            continue
        # State is keyed by tensor, so move it to the tensors of the parts.
        state: dict[str, Any] | None = inner.state.pop(segment.tensor, None)
        for pieces in parts:
            child = interval.segment(pieces)
            segments.append(child)
            if state:
                a, b = child.first - segment.first, child.end - segment.first
                # Split tensors of the segment's shape, and copy everything else to each part.
                inner.state[child.tensor] = {
                    key: value[a:b]
                    if isinstance(value, Tensor) and value.shape == segment.tensor.shape
                    else copy_value(value)
                    for key, value in state.items()
                }
    is_cut = len(segments) != len(interval.segments)
    interval.segments = segments
    return is_cut
