"""Splits the sequences of a batch across the ranks of a context group (`--context`).

    dimension 1    t0 t1 t2 t3 t4 t5 t6
    --context 2    └ rank 0 ┘└── rank 1 ─┘

Parts are contiguous, and their lengths differ by at most one. Tensors with fewer than two
dimensions, and objects that are not tensors, are passed to all ranks unchanged. Attention masks
with 4 dimensions are split along their sequence dimension:

    (rows, heads, length, length)   one value per (query, key): along the queries
    (rows, 1, 1, length)            one value per key: along the keys
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from shardwise.errors import DataError
from shardwise.layout.bucket_layout import even_cuts

DIM = 1
"""The sequence dimension in the tensors of a batch: (rows, length, ...)."""


def dim_of(shape: Sequence[int], length: int, keys: int) -> int | None:
    """Return the sequence dimension of a tensor, or None if it has none.

    Args:
        shape: The shape of the tensor.
        length: The number of tokens along this dimension, in full sequences or in a part.
        keys: The number of tokens in full sequences.
    """
    # Masks first: a mask may have as many heads as there are tokens.
    if len(shape) == 4 and tuple(shape[2:]) == (length, keys):
        return 2
    if len(shape) == 4 and tuple(shape[1:]) == (1, 1, length):
        return 3
    return DIM if len(shape) > DIM and shape[DIM] == length else None


def lengths_of(total: int, size: int) -> list[int]:
    """Return the lengths of the ranks' parts, for a sequence of length `total` on `size` ranks."""
    cuts = even_cuts(total, size)
    return [end - first for first, end in pairwise(cuts)]


def cut(batch: Any, rank: int, size: int, *, dim: int = 0, call: str) -> tuple[Any, int]:
    """Return part number `rank` of every sequence in `batch`, and the full sequence length.

    Args:
        batch: Nested container of tensors of shape (rows, length, ...).
        rank: Index of the part.
        size: Number of parts.
        dim: Dimension of the rows, which must be 0.
        call: The caller, for messages.

    Raises:
        DataError: Tensors have different lengths, or a part has fewer than two tokens.
    """
    if dim != 0:
        raise DataError(
            f"{call}(dim={dim}) cannot be combined with --context {size} yet: pass tensors of "
            "shape (rows, length, ...)."
        )
    named, nest = pytree.tree_flatten_with_path(batch)
    shapes = {
        f"batch{pytree.keystr(path)}": tuple(leaf.shape)
        for path, leaf in named
        if isinstance(leaf, Tensor) and leaf.ndim > DIM
    }
    lengths = {shape[DIM] for shape in shapes.values() if not _may_be_mask(shape)}
    if len(lengths) != 1 or any(
        dim_of(shape, total, total) is None for shape in shapes.values() for total in lengths
    ):
        found = ", ".join(f"{name}: {shape}" for name, shape in shapes.items()) or "none"
        raise DataError(
            f"{call}: --context {size} cuts sequences along dimension {DIM}, but the tensors with "
            f"two or more dimensions do not have one length there ({found}). Pass tensors of shape "
            "(rows, length, ...), also for positions. Masks may have the shape (rows, 1, length, "
            "length)."
        )
    (total,) = lengths
    # Models treat a sequence of one token as the next token of a cache, without a causal mask.
    if total < 2 * size:
        raise DataError(
            f"{call}: sequences of {total} token(s) are too short for --context {size}, which "
            f"needs {2 * size}. Pad the batch, or start without --context."
        )
    cuts = even_cuts(total, size)
    first, length = cuts[rank], cuts[rank + 1] - cuts[rank]

    def part(leaf: Any) -> Any:
        cut_dim = dim_of(leaf.shape, total, total) if isinstance(leaf, Tensor) else None
        # A part must be contiguous like the tensor itself, because user code may call `view`.
        return leaf if cut_dim is None else leaf.narrow(cut_dim, first, length).contiguous()

    return pytree.tree_unflatten([part(leaf) for _, leaf in named], nest), total


def _may_be_mask(shape: Sequence[int]) -> bool:
    return len(shape) == 4 and (shape[2] == shape[3] or shape[1] == shape[2] == 1)
