"""The rows of a batch: a nest of tensors that share their first dimension."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree


def lengths(batch: Any) -> list[int]:
    """The first dimensions that its tensors have, each once, in ascending order; 0 for none."""
    leaves = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
    return sorted({leaf.shape[0] if leaf.ndim else 0 for leaf in leaves})


def part(batch: Any, cuts: Sequence[int], number: int) -> tuple[int, Any]:
    """How many rows part `number` of those between `cuts` has, and the part; one row to run with
    where it has none."""
    first, end = cuts[number], cuts[number + 1]
    taken = slice(first, end) if end > first else slice(0, 1)
    return end - first, pytree.tree_map_only(Tensor, itemgetter(taken), batch)
