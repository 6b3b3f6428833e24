"""Moves any number of bytes between a device and the host through two pinned blocks, in pieces.

    down    device ══▶ block 0 ──▶ used    device ══▶ block 1 ──▶ used    ...
    up      filled ──▶ block 0 ══▶ device  filled ──▶ block 1 ══▶ device  ...

No copy (══▶) stops the host: it waits where it needs the bytes of a piece, or a block whose copy is
still on its way. So a file is read or written beside the copies.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from torch import Tensor

from shardwise.tiers.copy_stream import CopyStream
from shardwise.tiers.host_memory import padded
from shardwise.tiers.staging import Staging, StagingRing


class StagedBytes(NamedTuple):
    """`nbytes` bytes from byte `first` on, which are in `block` or will be."""

    first: int
    nbytes: int
    block: Staging

    @property
    def memory(self) -> Tensor:
        """Its bytes in the block: flat, uint8."""
        return self.block.tensor[: self.nbytes]

    @property
    def pages(self) -> memoryview:
        """The same in whole pages."""
        return self.block.view[: padded(self.nbytes)]


def down(
    copy_stream: CopyStream,
    ring: StagingRing,
    data: Tensor,
    after: Iterable[Any],
    unused: Callable[[], None] | None = None,
) -> Iterator[StagedBytes]:
    """Bring the bytes of `data` (uint8, on the device) down, after the events `after`.

    Yields each piece when it is here, while the next one comes. Its block may be read until the
    next is asked for; by others until `unused`, which is called before a block is written again,
    has returned.
    """
    behind = list(after)
    coming: deque[StagedBytes] = deque()
    for first in range(0, data.numel(), ring.nbytes):
        if unused is not None and first >= len(ring) * ring.nbytes:
            unused()
        part = data[first : first + ring.nbytes]
        piece = StagedBytes(first, part.numel(), ring.next())
        piece.block.copies = [copy_stream.start_down(part, piece.memory, behind)]
        coming.append(piece)
        if len(coming) == len(ring):
            yield _here(coming.popleft())
    while coming:
        yield _here(coming.popleft())


def _here(piece: StagedBytes) -> StagedBytes:
    piece.block.settle()
    return piece


def up(
    copy_stream: CopyStream, ring: StagingRing, data: Tensor, after: Iterable[Any]
) -> Iterator[StagedBytes]:
    """Let bytes go up into `data` (uint8, on the device), after the events `after`.

    Yields pieces with anything in them: each is to be filled, and goes up when the next one is
    asked for, or the end.
    """
    behind = list(after)
    for first in range(0, data.numel(), ring.nbytes):
        part = data[first : first + ring.nbytes]
        piece = StagedBytes(first, part.numel(), ring.next())
        yield piece
        piece.block.copies = [copy_stream.start_up(piece.memory, part, behind)]
