"""Divides a replica's tokens among its tensor-parallel ranks, which all have the same tokens.

Each rank dispatches only its share, so that no token reaches its experts twice:

    rank 0   t0 t1 t2 t3 ─▶ t0 t1 ─▶ experts ─▶ y0 y1 ─┐
                                                       ├─ all-gather ─▶ y0 y1 y2 y3 on both ranks
    rank 1   t0 t1 t2 t3 ─▶ t2 t3 ─▶ experts ─▶ y2 y3 ─┘

The backward pass takes this rank's share of the gradient of y, and all-gathers the gradients of the
tokens and gates. So every rank has the full gradient of everything that all ranks compute in the
same way, such as the router, and no sum over the ranks is needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

from shardwise.comm import Collectives, Solo
from shardwise.layout.bucket_layout import even_cuts
from shardwise.parallel.tensor.region_collectives import (
    ShardedDim,
    gather_from_region,
    scatter_to_region,
)

ALONE = Solo()


@dataclass(frozen=True)
class TokenShare:
    """The consecutive tokens that this rank dispatches in a forward pass.

    Args:
        group: The ranks with the same tokens.
        tokens: The number of tokens, which may be less than the number of ranks.
    """

    group: Collectives
    tokens: int

    @property
    def _sharded(self) -> ShardedDim:
        # In rank order, so that an expert's rows stay in the order of the batch.
        return ShardedDim(-2, list(pairwise(even_cuts(self.tokens, self.group.size))))

    def of(self, whole: Tensor) -> Tensor:
        """Return this rank's rows of `whole` (T, n), which all ranks have. Differentiable."""
        if self.group.size == 1:
            return whole
        return scatter_to_region(whole, self.group, self._sharded)

    def view_of(self, whole: Tensor) -> Tensor:
        """Return this rank's rows of `whole` (T, n) as a view, for tensors without a gradient."""
        return self._sharded.shard(whole, self.group.rank)

    def joined(self, part: Tensor) -> Tensor:
        """Return all ranks' rows as (T, n), from each rank's `part`. Differentiable, collective."""
        if self.group.size == 1:
            return part
        return gather_from_region(part, self.group, self._sharded)
