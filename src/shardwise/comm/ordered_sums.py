"""Sums all ranks' rows in a fixed order, so that every run computes bit-identical results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shardwise.layout import sum_tree

CHUNK = 1 << 18
"""Number of elements summed at a time, so that a piece of every rank's row stays in the cache."""

NARROW = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Sum:
    """The accumulation dtype, order and scale of a sum across ranks.

    Attributes:
        exact: Sum 16-bit floats in fp32, and round once.
        in_tree: Sum in the reduction tree of sum_tree.py, which is the same on every transport.
            Otherwise, sum in rank order.
        scale: Factor that is applied to the sum before it is rounded. It must be 1 for integers.
    """

    exact: bool = True
    in_tree: bool = False
    scale: float = 1.0

    def wide(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which values of `dtype` are accumulated."""
        return torch.float32 if self.exact and dtype in NARROW else dtype

    @property
    def partial(self) -> Sum:
        """The same settings, but with a scale of 1, for a sum that becomes part of another sum."""
        return replace(self, scale=1.0)

    def scaled(self, total: Tensor) -> Tensor:
        """Multiply a sum by `scale`, in place."""
        return total if self.scale == 1.0 else total.mul_(self.scale)


PLAIN = Sum()


def sum_in_rank_order(rows: Sequence[Tensor], out: Tensor, how: Sum) -> None:
    """Compute out = rows[0] + rows[1] + ... as `how` specifies. `out` may be one of the rows."""
    # Process chunks, so that each element is read from memory once and partial sums stay in the
    # cache.
    wide = how.wide(rows[0].dtype)
    between = len(rows) > 2 or (len(rows) > 1 and wide != rows[0].dtype)
    length = min(CHUNK, out.numel()) if between and not how.in_tree else 0
    total = torch.empty(length, dtype=wide, device=out.device)
    for start in range(0, out.numel(), CHUNK):
        piece, parts = out[start : start + CHUNK], [row[start : start + CHUNK] for row in rows]
        if how.in_tree:
            sum_in_tree(parts, piece, wide, how.scale)
        else:
            _sum(parts, piece, total[: piece.numel()], how)


def sum_in_tree(
    rows: Sequence[Tensor], out: Tensor, dtype: torch.dtype, scale: float = 1.0
) -> None:
    """Add `rows` in `dtype` in the order of `sum_tree`. Write the sum times `scale` to `out`."""
    total = sum_tree.fold([row.to(dtype) for row in rows], torch.add)
    out.copy_(total if scale == 1.0 else total * scale)


def _sum(rows: Sequence[Tensor], out: Tensor, total: Tensor, how: Sum) -> None:
    """Sum `rows` into `out`. `total` holds the intermediate sums."""
    # `out` may be one of the rows, so write it last.
    if len(rows) == 1:
        how.scaled(out.copy_(rows[0]))
        return
    first, *middle, last = rows
    if total.dtype != first.dtype:
        total.copy_(first)
        for row in [*middle, last]:
            total.add_(row)
        out.copy_(how.scaled(total))
        return
    for row in middle:
        first = torch.add(first, row, out=total)
    how.scaled(torch.add(first, last, out=out))
