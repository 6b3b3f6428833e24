"""Sums over the ranks, always in one order, so that every run gives the same bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise import tree as trees
from shardwise.collectives.base import Each

CHUNK = 1 << 16
"""Elements summed at a time: a piece of every rank's row stays in the cache."""

NARROW = (torch.bfloat16, torch.float16)


def sum_in_rank_order(
    rows: Sequence[Tensor],
    out: Tensor,
    *,
    exact_sum: bool = True,
    tree: bool = False,
    each: Each | None = None,
) -> None:
    """out = rows[0] + rows[1] + ..., from the left; `out` may be one of the rows.

    With `tree`, neighbours are joined as in shardwise.tree instead. With `exact_sum`, 16-bit
    floats are summed in fp32 and rounded once. `each` is called with the pieces of `out`, one at
    least; how they are cut depends on its length alone.
    """
    wide = torch.float32 if exact_sum and rows[0].dtype in NARROW else rows[0].dtype
    total = torch.empty(min(CHUNK, out.numel()), dtype=wide)
    pieces = zip(*(torch.split(row, CHUNK) for row in rows), strict=True)
    for piece, parts in zip(torch.split(out, CHUNK), pieces, strict=True):
        if tree:
            sum_in_tree(parts, piece, wide)
        else:
            _sum(parts, piece, total[: piece.numel()])
        if each is not None:
            each(piece)


def sum_in_tree(rows: Sequence[Tensor], out: Tensor, dtype: torch.dtype) -> None:
    """out = the rows joined in the tree of shardwise.tree, added in `dtype`."""
    out.copy_(trees.fold([row.to(dtype) for row in rows], torch.add))


def _sum(rows: Sequence[Tensor], out: Tensor, total: Tensor) -> None:
    """`out` is written last, since it may be one of the rows."""
    if len(rows) == 1:
        out.copy_(rows[0])
        return
    first, *middle, last = rows
    if total.dtype != first.dtype:
        total.copy_(first)
        for row in [*middle, last]:
            total.add_(row)
        out.copy_(total)
        return
    for row in middle:
        first = torch.add(first, row, out=total)
    torch.add(first, last, out=out)
