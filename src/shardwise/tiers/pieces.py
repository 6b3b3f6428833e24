"""Copies any number of bytes between a device and the host, in pieces through two pinned blocks.

    down    device ══▶ block 0 ──▶ used    device ══▶ block 1 ──▶ used    ...
    up      filled ──▶ block 0 ══▶ device  filled ──▶ block 1 ══▶ device  ...

Copies (══▶) are asynchronous. The host waits only if it needs a piece's bytes, or a block that is
still being copied. A file can therefore be read or written in parallel with the copies.
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
    """A piece of `nbytes` bytes in `block`. It starts at byte `first` of the data."""

    first: int
    nbytes: int
    block: Staging

    @property
    def memory(self) -> Tensor:
        """The piece's bytes in the block: uint8 of shape (nbytes,)."""
        return self.block.tensor[: self.nbytes]

    @property
    def pages(self) -> memoryview:
        """The piece's bytes, rounded up to whole pages."""
        return self.block.view[: padded(self.nbytes)]


def down(
    copy_stream: CopyStream,
    ring: StagingRing,
    data: Tensor,
    after: Iterable[Any],
    unused: Callable[[], None] | None = None,
) -> Iterator[StagedBytes]:
    """Copy `data` (1-D, uint8, on the device) to the host once the events `after` complete.

    Yields each piece once it is on the host, while the next one is copied. The caller may read a
    piece's block until it requests the next piece. If other threads need a block for longer, pass
    `unused`: it is called before a block is overwritten, and must wait until those threads have
    finished.
    """
    behind = list(after)
    pending: deque[StagedBytes] = deque()
    for first in range(0, data.numel(), ring.nbytes):
        # From here on the ring reuses its blocks.
        if unused is not None and first >= len(ring) * ring.nbytes:
            unused()
        part = data[first : first + ring.nbytes]
        piece = StagedBytes(first, part.numel(), ring.next())
        piece.block.copies = [copy_stream.start_down(part, piece.memory, behind)]
        pending.append(piece)
        if len(pending) == len(ring):
            yield _completed(pending.popleft())
    while pending:
        yield _completed(pending.popleft())


def _completed(piece: StagedBytes) -> StagedBytes:
    piece.block.settle()
    return piece


def up(
    copy_stream: CopyStream, ring: StagingRing, data: Tensor, after: Iterable[Any]
) -> Iterator[StagedBytes]:
    """Copy bytes from the host to `data` (1-D, uint8, on the device) after the events `after`.

    Yields pieces with arbitrary content, which the caller fills. Requesting the next piece starts
    the copy of the previous one.
    """
    behind = list(after)
    for first in range(0, data.numel(), ring.nbytes):
        part = data[first : first + ring.nbytes]
        piece = StagedBytes(first, part.numel(), ring.next())
        yield piece
        piece.block.copies = [copy_stream.start_up(piece.memory, part, behind)]
