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
from torch import Tensor

from shardwise.layout.bucket_layout import Bucket, Piece
from shardwise.states.storage.storage import Span, Storage


@dataclass(eq=False)
class UpdateSegment:
    """Elements [first, end) of an interval (counted in the bucket), updated as one tensor."""

    first: int
    end: int
    pieces: list[Piece]
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
    """What of the interval is in memory at a time."""
    segments: list[UpdateSegment] = field(default_factory=list)

    def segment(self, pieces: list[Piece]) -> UpdateSegment:
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
    def has_master(self) -> bool:
        """Whether the optimizer updates a master in place of the parameters."""
        return self.master is not self.target

    @property
    def pieces(self) -> list[list[Piece]]:
        """What lies in the interval, by span."""
        start = self.own[0]
        return [self.bucket.pieces(start + first, start + end) for first, end in self.spans]

    @property
    def all_pieces(self) -> list[Piece]:
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


def runs(pieces: Sequence[Piece], mark: Callable[[Piece], Any]) -> list[list[Piece]]:
    """Consecutive pieces of equal mark, together."""
    found: list[list[Piece]] = []
    before: Any = object()
    for piece in pieces:
        now = mark(piece)
        if now != before:
            found.append([])
        found[-1].append(piece)
        before = now
    return found


def is_flat_state(value: Any, tensor: Tensor) -> bool:
    """Whether `value` is optimizer state of the form of `tensor`, and is cut with it."""
    return isinstance(value, Tensor) and value.shape == tensor.shape


def copied(value: Any) -> Any:
    """`value`, sharing no memory with it."""
    return value.clone() if isinstance(value, Tensor) else value
