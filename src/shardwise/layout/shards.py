"""Describes the part of a split tensor that each rank of a replica holds. Pure arithmetic.

A tensor is split along one dim, and each rank holds one or several ranges of that dim. For example,
a fused projection matrix computes queries, keys and values together. Each rank holds the rows of
its own heads in each of the three:

    full, dim 0    | q0 q1 q2 q3 | k0 k1 k2 k3 | v0 v1 v2 v3 |
    rank 1 of 2    |       q2 q3         k2 k3         v2 v3 |    three ranges
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import torch
from torch import Tensor

from shardwise.layout.bucket_layout import Span

Ranges = tuple[Span, ...]
"""Index ranges of a dim."""


def even_ranges(length: int, parts: int, *, grain: int = 1, blocks: int = 1) -> list[Ranges]:
    """Split a dim of `length` into non-empty, nearly equal parts. Return the ranges of each part.

    The dim consists of `blocks` blocks of equal length. Every block is split at the same offsets,
    which are multiples of `grain`. Raises ValueError if `length` is not a multiple of `blocks` *
    `grain`, or if a block has fewer grains than there are parts.
    """
    block = length // blocks
    grains = block // grain
    if block * blocks != length or grains * grain != block or grains < parts:
        raise ValueError(f"{grains} cannot be spread over {parts}")
    # The first parts get one extra grain each, as in torch.tensor_split.
    each, more = divmod(grains, parts)
    edges = [grain * (each * part + min(part, more)) for part in range(parts + 1)]
    return [
        tuple((number * block + first, number * block + end) for number in range(blocks))
        for first, end in pairwise(edges)
    ]


@dataclass(frozen=True)
class Shard:
    """The part of a tensor that rank `rank` holds."""

    shape: tuple[int, ...]
    """Shape of the full tensor."""
    dim: int
    """The dim along which the tensor is split."""
    ranges: tuple[Ranges, ...]
    """Each rank's ranges of that dim."""
    rank: int

    @property
    def own(self) -> Ranges:
        """This rank's ranges of `dim`."""
        return self.ranges[self.rank]

    @property
    def is_partial(self) -> bool:
        """True if any rank's part of the tensor is neither empty nor the full tensor."""
        lengths = (sum(end - first for first, end in each) for each in self.ranges)
        return any(0 < length < self.shape[self.dim] for length in lengths)

    @property
    def most(self) -> int:
        """Number of elements in the largest part."""
        rest = prod(self.shape) // max(self.shape[self.dim], 1)
        return rest * max(sum(end - first for first, end in each) for each in self.ranges)

    def of(self, whole: Tensor) -> Tensor:
        """Return a copy of this rank's part of the full tensor `whole`."""
        pieces = [whole.narrow(self.dim, first, end - first) for first, end in self.own]
        if not pieces:  # a rank may hold nothing, such as the experts of other ranks
            return whole.new_empty(self.part_shape(self.rank))
        # `cat` copies even a single piece. A view would keep the full tensor alive.
        return torch.cat(pieces, self.dim).contiguous()

    def part_shape(self, rank: int) -> tuple[int, ...]:
        """Return the shape of the part that `rank` holds."""
        length = sum(end - first for first, end in self.ranges[rank])
        return (*self.shape[: self.dim], length, *self.shape[self.dim + 1 :])

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """Join the parts of all ranks into the full tensor."""
        # A part stores its ranges one after the other. Copy each range back to its position in the
        # full tensor.
        whole = parts[0].new_empty(self.shape)
        for part, ranges in zip(parts, self.ranges, strict=True):
            start = 0
            for first, end in ranges:
                piece = part.narrow(self.dim, start, end - first)
                whole.narrow(self.dim, first, end - first).copy_(piece)
                start += end - first
        return whole

    def whole_indices(self, elements: Tensor) -> Tensor:
        """Return the index in the flattened full tensor of `elements` of this rank's flat part.

        `elements` and the result are of int64: (n,).
        """
        inner = prod(self.shape[self.dim + 1 :])
        lengths = [(end - first) * inner for first, end in self.own]
        row = sum(lengths)
        within = elements % row
        # Each range starts further behind in the full tensor than in the part.
        index, edge = elements // row * (self.shape[self.dim] * inner) + within, 0
        for (first, _), length in zip(self.own, lengths, strict=True):
            shift = first * inner - edge
            index += (within >= edge).logical_and_(within < edge + length) * shift
            edge += length
        return index

    def runs(self, first: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Yield elements [first, end) of this rank's flattened part as runs (start, end, offset).

        Each run is contiguous in the flattened full tensor, too, and starts there at `offset`.
        """
        inner = prod(self.shape[self.dim + 1 :])
        # A row holds this rank's elements for one index of the dims before `dim`. `edges` are the
        # boundaries of its ranges, in elements. Each range is contiguous in the full tensor, too.
        edges = [0]
        for a, b in self.own:
            edges.append(edges[-1] + (b - a) * inner)
        row, low = edges[-1], first
        while low < end:
            number, within = divmod(low, row)
            which = next(n for n, edge in enumerate(edges[1:]) if within < edge)
            high = min(end, number * row + edges[which + 1])
            begin = (number * self.shape[self.dim] + self.own[which][0]) * inner
            yield low, high, begin + within - edges[which]
            low = high
