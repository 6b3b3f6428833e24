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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shardwise.errors import DataError
from shardwise.layout.bucket_layout import even_cuts

DIM = 1
"""The sequence dimension in the tensors of a batch by default: (rows, length, ...)."""

SequenceDim = int | Mapping[Any, int | None]
"""The sequence dimension of all tensors of a batch, or of each by its name or position in the
batch. None: the tensor is not split."""


@dataclass(frozen=True)
class Sequences:
    """The sequences of a batch, before they were split.

    Attributes:
        length: Their number of tokens.
        rows: Their number.
        dims: The sequence dimension of the batch's tensors, by number of dims and dtype.
    """

    length: int
    rows: int
    dims: Mapping[tuple[int, torch.dtype], int] = field(default_factory=dict)

    def dim_of(self, tensor: Tensor, length: int) -> int | None:
        """Return the likely sequence dimension of an input of the model, or None if it has none.

        `length` is the number of tokens along this dimension, in full sequences or in a part.
        """
        return next(iter(self.dims_of(tensor, length)), None)

    def dims_of(self, tensor: Tensor, length: int) -> list[int]:
        """Return the possible sequence dimensions of an input of the model, the likeliest first.

        The script may have transposed the batch's tensors, or computed others from them.
        """
        shape = tensor.shape
        # Masks first: a mask may have as many heads as there are tokens.
        if (dim := _dim_of_mask(shape, length, self.length)) is not None:
            return [dim]
        given = self.dims.get((tensor.ndim, tensor.dtype), DIM)
        dims = [dim for dim in (given, DIM) if len(shape) > dim and shape[dim] == length]
        if len(shape) > 1 and tuple(shape[:2]) == (length, self.rows):
            dims.append(0)
        return list(dict.fromkeys(dims))


def _dim_of_mask(shape: Sequence[int], length: int, keys: int) -> int | None:
    """Return the sequence dimension of an attention mask, or None if `shape` is not that of one."""
    if len(shape) == 4 and tuple(shape[2:]) == (length, keys):
        return 2
    return 3 if len(shape) == 4 and tuple(shape[1:]) == (1, 1, length) else None


def lengths_of(total: int, size: int) -> list[int]:
    """Return the lengths of the ranks' parts, for a sequence of length `total` on `size` ranks."""
    cuts = even_cuts(total, size)
    return [end - first for first, end in pairwise(cuts)]


def cut(
    batch: Any,
    rank: int,
    size: int,
    *,
    call: str,
    dim: SequenceDim | None = None,
    rows_dim: int = 0,
) -> tuple[Any, Sequences]:
    """Return part number `rank` of every sequence in `batch`, and the full sequences.

    Args:
        batch: Nested container of tensors of shape (rows, length, ...).
        rank: Index of the part.
        size: Number of parts.
        call: The caller, for messages.
        dim: The sequence dimension, if it is not 1.
        rows_dim: Dimension of the rows, if the caller knows it.

    Raises:
        DataError: Tensors have different lengths, or a part has fewer than two tokens.
    """
    named, nest = pytree.tree_flatten_with_path(batch)
    given = _given_dims(named, dim, call)
    if rows_dim != 0 and (not given or rows_dim in given.values()):
        raise DataError(
            f"{call}(dim={rows_dim}) with --context {size}: rows are along dimension {rows_dim}, "
            "so write along which dimension sequences are split: "
            f"{call}(batch, dim={rows_dim}, sequence_dim=0)."
        )
    tensors = {
        number: leaf
        for number, (_, leaf) in enumerate(named)
        if isinstance(leaf, Tensor) and (leaf.ndim > DIM or number in given)
    }
    # The sequence dimension of each tensor, except of masks and of tensors that are not split.
    dims = {
        number: given.get(number, DIM)
        for number, leaf in tensors.items()
        if number in given or not _may_be_mask(leaf.shape)
    }
    lengths = {tensors[number].shape[each] for number, each in dims.items() if each is not None}
    if len(lengths) == 1:
        (total,) = lengths
        for number, leaf in tensors.items():
            if number not in dims:
                found = _dim_of_mask(leaf.shape, total, total)
                is_other = found is None and leaf.shape[DIM] != total
                lengths |= {-1} if is_other else set()
                dims[number] = DIM if found is None else found
    if len(lengths) != 1:
        found_shapes = ", ".join(
            f"batch{pytree.keystr(named[number][0])}: {tuple(leaf.shape)}"
            for number, leaf in tensors.items()
        )
        where = f"dimension {DIM}" if dim is None else f"sequence_dim={dim!r}"
        raise DataError(
            f"{call}: --context {size} cuts sequences along {where}, but the tensors with "
            f"two or more dimensions do not have one length there ({found_shapes or 'none'}). "
            "Pass tensors of shape (rows, length, ...), also for positions. Masks may have the "
            "shape (rows, 1, length, length). For another dimension, pass sequence_dim= to "
            "sw.Loader or world.share: sequence_dim=0 for (length, rows, ...), or "
            "sequence_dim={name: dimension, name: None} by the names of the batch's tensors, with "
            "None for one that is not split."
        )
    # Models treat a sequence of one token as the next token of a cache, without a causal mask.
    if total < 2 * size:
        raise DataError(
            f"{call}: sequences of {total} token(s) are too short for --context {size}, which "
            f"needs {2 * size}. Pad the batch, or start without --context."
        )
    cuts = even_cuts(total, size)
    first, length = cuts[rank], cuts[rank + 1] - cuts[rank]
    leaves = [leaf for _, leaf in named]
    forms: dict[tuple[int, torch.dtype], int] = {}
    rows = 0
    for number, each in dims.items():
        if each is None:
            continue
        leaf = tensors[number]
        # A part must be contiguous like the tensor itself, because user code may call `view`.
        leaves[number] = leaf.narrow(each, first, length).contiguous()
        forms.setdefault((leaf.ndim, leaf.dtype), each)
        # Of the first tensor that is not a mask.
        rows = rows or leaf.size(0 if each else min(1, leaf.ndim - 1))
    return pytree.tree_unflatten(leaves, nest), Sequences(total, rows, forms)


def _given_dims(
    named: Sequence[tuple[Any, Any]], dim: SequenceDim | None, call: str
) -> dict[int, int | None]:
    """Return the sequence dimension of tensors by their number, where the user has passed one.

    Raises DataError if a tensor does not have the dimension, or if no tensor has a name of `dim`.
    """
    if dim is None:
        return {}
    if isinstance(dim, Mapping):
        keys = [[_key_of(step) for step in path] for path, _ in named]
        if unknown := [name for name in dim if not any(name in path for path in keys)]:
            raise DataError(
                f"{call}: sequence_dim names {unknown[0]!r}, but the batch has "
                f"{', '.join(pytree.keystr(path) for path, _ in named) or 'nothing'}."
            )
        chosen = {
            number: next(dim[name] for name in dim if name in path)
            for number, path in enumerate(keys)
            if any(name in path for name in dim)
        }
    else:
        chosen = {
            number: dim
            for number, (_, leaf) in enumerate(named)
            if isinstance(leaf, Tensor) and leaf.ndim > DIM and not _may_be_mask(leaf.shape)
        }
    for number, each in chosen.items():
        path, leaf = named[number]
        if each is None:
            continue
        if not isinstance(leaf, Tensor) or not -leaf.ndim <= each < leaf.ndim:
            found = tuple(leaf.shape) if isinstance(leaf, Tensor) else type(leaf).__name__
            raise DataError(
                f"{call}: sequence_dim={each}, but batch{pytree.keystr(path)} is {found}. Write "
                "the dimension of each tensor by its name: sequence_dim={name: dimension}."
            )
        chosen[number] = each % leaf.ndim
    return chosen


def _key_of(step: Any) -> Any:
    """Return the name or position that a `step` of a path into a batch stands for."""
    return getattr(step, "key", getattr(step, "idx", getattr(step, "name", None)))


def _may_be_mask(shape: Sequence[int]) -> bool:
    return len(shape) == 4 and (shape[2] == shape[3] or shape[1] == shape[2] == 1)
