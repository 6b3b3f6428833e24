"""The rows of a batch: a nest of tensors that share their first dimension, or another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree


def lengths(batch: Any, dim: int = 0) -> list[int]:
    """The sizes that its tensors have in dimension `dim`, each once, in ascending order; 0 for a
    tensor without it, and for none."""
    leaves = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
    return sorted({leaf.shape[dim] if -leaf.ndim <= dim < leaf.ndim else 0 for leaf in leaves})


def part(batch: Any, cuts: Sequence[int], number: int, dim: int = 0) -> tuple[int, Any]:
    """How many rows part `number` of those between `cuts` has, and the part; one row to run with
    where it has none."""
    first, end = cuts[number], cuts[number + 1]
    return end - first, taken(batch, first, end, dim)


def taken(batch: Any, first: int, end: int, dim: int = 0) -> Any:
    """Rows [first, end) of `batch`; its first one where that is none."""
    if end == first:
        first, end = 0, 1
    return pytree.tree_map_only(Tensor, lambda leaf: leaf.narrow(dim, first, end - first), batch)
