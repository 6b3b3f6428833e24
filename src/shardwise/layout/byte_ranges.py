"""Computes which bytes of which file a rank's elements are. Pure arithmetic.

What a rank holds of a state lies flat, across the borders of parameters; a file holds whole
tensors end to end. An extent is what both have in common:

    interval of a rank    | ...c |  d   | a..  |          elements [start, end)
                              \\     |     /
    file            |  a  |   b   |   c    |  d  |        tensor, and the element `offset` in it
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from shardwise.layout.bucket_layout import Piece, even_cuts
from shardwise.layout.shards import Shard


@dataclass(frozen=True)
class Extent:
    """Elements [start, end) of a flat memory, which are elements from `offset` on of `tensor`."""

    tensor: str
    start: int
    end: int
    offset: int

    @property
    def numel(self) -> int:
        """Its elements."""
        return self.end - self.start


@dataclass(frozen=True)
class ByteRange:
    """Bytes [start, end) of a memory, which are bytes from `at` on of `tensor`."""

    tensor: str
    start: int
    end: int
    at: int


def extents(
    pieces: Iterable[Piece],
    first: int,
    names: Mapping[int, str],
    shards: Mapping[int, Shard] | None = None,
) -> list[Extent]:
    """The extents of an interval that starts at element `first` of a bucket.

    `pieces` are what lies in it, `names` the tensors by parameter; those without a name are left
    out. `shards` says of which parameters a rank has a part only.
    """
    found = []
    for piece in (p for p in pieces if p.parameter in names):
        start, end = piece.start - first, piece.end - first
        extent = Extent(names[piece.parameter], start, end, piece.offset)
        shard = shards.get(piece.parameter) if shards is not None else None
        found += [extent] if shard is None else of_whole(extent, shard)
    return found


def of_whole(extent: Extent, shard: Shard) -> list[Extent]:
    """An extent of a part of a tensor, as those of the whole."""
    low = extent.offset
    return [
        Extent(extent.tensor, extent.start + start - low, extent.start + end - low, offset)
        for start, end, offset in shard.runs(low, low + extent.numel)
    ]


def clipped(parts: Iterable[Extent], first: int, end: int) -> list[Extent]:
    """What of `parts` lies in the elements [first, end), counted from `first`."""
    found = []
    for part in parts:
        low, high = max(part.start, first), min(part.end, end)
        if low < high:
            offset = part.offset + low - part.start
            found.append(Extent(part.tensor, low - first, high - first, offset))
    return found


def share(numel: int, index: int, of: int) -> tuple[int, int]:
    """The elements [first, end) that number `index` writes where `of` ranks hold the same."""
    cuts = even_cuts(numel, of)
    return cuts[index], cuts[index + 1]


def byte_ranges(parts: Sequence[Extent], itemsize: int, chunk: int) -> list[ByteRange]:
    """`parts` in bytes, in ranges of at most `chunk` bytes; what has no element is left out."""
    found = []
    for part in parts:
        begin, end = part.start * itemsize, part.end * itemsize
        for start in range(begin, end, chunk):
            at = part.offset * itemsize + start - begin
            found.append(ByteRange(part.tensor, start, min(start + chunk, end), at))
    return found
