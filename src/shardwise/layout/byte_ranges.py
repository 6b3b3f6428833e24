"""Maps a rank's elements to byte ranges of a checkpoint file. Pure arithmetic.

A rank stores an interval of flat memory, which may start or end inside a parameter. A file contains
full tensors end to end. An extent is a range that is contiguous in both:

    interval of a rank    | ...c |  d   | a..  |          elements [start, end)
                              \\     |     /
    file            |  a  |   b   |   c    |  d  |        tensor, and the element `offset` in it
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from shardwise.layout.bucket_layout import Slot, Span, even_cuts
from shardwise.layout.shards import Shard


@dataclass(frozen=True)
class Extent:
    """Elements [start, end) of flat memory, which hold `tensor` starting with its element `offset`.

    In the result of `byte_ranges`, `start`, `end` and `offset` count bytes instead.
    """

    tensor: str
    start: int
    end: int
    offset: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.end - self.start


def extents(
    pieces: Iterable[Slot],
    first: int,
    names: Mapping[int, str],
    shards: Mapping[int, Shard] | None = None,
) -> list[Extent]:
    """Return the extents of an interval that starts at element `first` of a bucket.

    Args:
        pieces: Parts of parameters in the interval.
        first: First element of the interval, counted from the start of the bucket.
        names: Tensor name of each parameter. Parameters without a name are skipped.
        shards: The shard of each parameter that this rank holds only in part.
    """
    found = []
    for piece in (p for p in pieces if p.parameter in names):
        start, end = piece.start - first, piece.end - first
        extent = Extent(names[piece.parameter], start, end, piece.offset)
        shard = shards.get(piece.parameter) if shards is not None else None
        found += [extent] if shard is None else of_whole(extent, shard)
    return found


def of_whole(extent: Extent, shard: Shard) -> list[Extent]:
    """Convert an extent of this rank's part of a tensor to extents of the full tensor."""
    low = extent.offset
    return [
        Extent(extent.tensor, extent.start + start - low, extent.start + end - low, offset)
        for start, end, offset in shard.runs(low, low + extent.numel)
    ]


def clipped(parts: Iterable[Extent], first: int, end: int) -> list[Extent]:
    """Return the portions of `parts` in elements [first, end), with starts relative to `first`."""
    found = []
    for part in parts:
        low, high = max(part.start, first), min(part.end, end)
        if low < high:
            offset = part.offset + low - part.start
            found.append(Extent(part.tensor, low - first, high - first, offset))
    return found


def share(numel: int, index: int, of: int) -> Span:
    """Return the elements [first, end) that rank `index` writes if `of` ranks hold a tensor."""
    # Each replica writes a different part, so that replicas share the work of a checkpoint.
    cuts = even_cuts(numel, of)
    return cuts[index], cuts[index + 1]


def byte_ranges(parts: Sequence[Extent], itemsize: int, chunk: int) -> list[Extent]:
    """Convert `parts` from elements to non-empty byte ranges of at most `chunk` bytes."""
    found = []
    for part in parts:
        begin, end = part.start * itemsize, part.end * itemsize
        for start in range(begin, end, chunk):
            offset = part.offset * itemsize + start - begin
            found.append(Extent(part.tensor, start, min(start + chunk, end), offset))
    return found
