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

from collections.abc import Collection, Mapping, Sequence
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
        dims: The sequence dimensions of the batch's tensors, by number of dims and dtype.
        uncut: Shape without the first dimension of each tensor that was not split, and whether it
            has floating point. Those that a part also has are left out.
    """

    length: int
    rows: int
    dims: Mapping[tuple[int, torch.dtype], tuple[int, ...]] = field(default_factory=dict)
    uncut: frozenset[_Form] = frozenset()

    @property
    def all_dims(self) -> set[int]:
        """All dimensions along which tensors of the batch were split."""
        return {dim for each in self.dims.values() for dim in each}

    def is_uncut(self, tensor: Tensor) -> bool:
        """Return whether `tensor` looks like a tensor of the batch that was not split."""
        return _form_of(tensor) in self.uncut

    def dim_of(self, tensor: Tensor, length: int) -> int | None:
        """Return the sequence dimension that an input of the model probably has, or None.

        `length` is the number of tokens along this dimension, in full sequences or in a part.
        """
        return next(iter(self.dims_of(tensor, length)), None)

    def dims_of(self, tensor: Tensor, length: int) -> list[int]:
        """Return the possible sequence dimensions of an input of the model, the likeliest first.

        The script may have transposed the batch's tensors, or computed others from them.
        """
        return [] if self.is_uncut(tensor) else self.dims_by_shape(tensor, [length])

    def dims_by_shape(self, tensor: Tensor, lengths: Collection[int]) -> list[int]:
        """Return the dimensions that may have one of these `lengths` of sequences or parts."""
        shape = tensor.shape
        # Masks first: a mask may have as many heads as there are tokens.
        if (dim := _dim_of_mask(shape, lengths, self.length)) is not None:
            return [dim]
        given = self.dims.get((tensor.ndim, tensor.dtype), ())
        dims = [dim for dim in (*given, DIM) if len(shape) > dim and shape[dim] in lengths]
        if len(shape) > 1 and shape[0] in lengths and shape[1] == self.rows:
            dims.append(0)
        return list(dict.fromkeys(dims))


_Form = tuple[tuple[int, ...], bool]


def _form_of(tensor: Tensor) -> _Form:
    # Without rows, whose number differs in micro-batches, and without the precision, which the
    # script may change.
    return tuple(tensor.shape[1:]), tensor.is_floating_point()


def rows_in(tensors: Sequence[tuple[Tensor, int]]) -> int:
    """Return the number of rows of `tensors`, which are given with their sequence dimensions."""
    # Rows are not in dimension 0 of (3, rows, length), as positions of images, nor in (length,).
    for tensor, dim in sorted(tensors, key=lambda each: each[1] > DIM or each[0].ndim == 1):
        return 1 if tensor.ndim == 1 else tensor.size(0 if dim else 1)
    return 0


def _dim_of_mask(shape: Sequence[int], lengths: Collection[int], keys: int) -> int | None:
    """Return the sequence dimension of an attention mask, or None if `shape` fits no mask."""
    if len(shape) == 4 and shape[2] in lengths and shape[3] == keys:
        return 2
    return 3 if len(shape) == 4 and tuple(shape[1:3]) == (1, 1) and shape[3] in lengths else None


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
    rows_dim: int | None = None,
) -> tuple[Any, Sequences]:
    """Return part number `rank` of every sequence in `batch`, and the full sequences.

    Args:
        batch: Nested container of tensors of shape (rows, length, ...). Another mapping than a dict
            becomes a dict.
        rank: Index of the part.
        size: Number of parts.
        call: The caller, for messages.
        dim: The sequence dimension, if it is not 1.
        rows_dim: Dimension of the rows, if the caller knows it.

    Raises:
        DataError: Tensors have different lengths, a part has fewer than two tokens, or a sequence
            dimension is also the dimension of the rows.
    """
    named, nest = _named_leaves(as_tree(batch))
    given, beside = _given_dims(named, dim, call)
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
                found = _dim_of_mask(leaf.shape, [total], total)
                if found is None:  # it only looks like a mask
                    found = beside.get(number, DIM)
                    lengths.add(leaf.size(found))
                dims[number] = found
    for number, each in dims.items():
        leaf = tensors[number]
        if each is not None and rows_dim is not None and each == rows_dim % leaf.ndim:
            shown = f"batch{pytree.keystr(named[number][0])} of shape {tuple(leaf.shape)}"
            raise DataError(
                f"{call}(dim={rows_dim}) with --context {size}: {shown} would be split along "
                f"dimension {each}, which are its rows. For tensors of shape (length, rows, ...), "
                f"write {call}(batch, dim=1, sequence_dim=0). A dict as sequence_dim must name all "
                "of them. For tensors of shape (rows, length, ...), leave out both."
            )
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
            "sw.Loader or world.share: for (length, rows, ...) sw.Loader(..., sequence_dim=0) or "
            "world.share(batch, dim=1, sequence_dim=0), and otherwise "
            "sequence_dim={name: dimension, name: None} by the names of the batch's tensors, with "
            "None for one that is not split."
        )
    # Models treat a sequence of one token as the next token of a cache, without a causal mask.
    if size > 1 and total < 2 * size:
        raise DataError(
            f"{call}: sequences of {total} token(s) are too short for --context {size}, which "
            f"needs {2 * size}. Pad the batch, or start without --context."
        )
    cuts = even_cuts(total, size)
    first, length = cuts[rank], cuts[rank + 1] - cuts[rank]
    leaves = [leaf for _, leaf in named]
    forms: dict[tuple[int, torch.dtype], tuple[int, ...]] = {}
    parts = set()
    split = [(tensors[number], each) for number, each in dims.items() if each is not None]
    for number, each in dims.items():
        if each is None:
            continue
        leaf = tensors[number]
        # A part must be contiguous like the tensor itself, because user code may call `view`.
        leaves[number] = leaf.narrow(each, first, length).contiguous()
        form = leaf.ndim, leaf.dtype
        forms[form] = tuple(dict.fromkeys([*forms.get(form, ()), each]))
        # All ranks must find the same, so these are the forms of all of their parts.
        parts |= {_form_of(leaf.narrow(each, 0, own)) for own in lengths_of(total, size)}
    uncut = {
        _form_of(leaf)
        for number, (_, leaf) in enumerate(named)
        if isinstance(leaf, Tensor) and leaf.ndim and dims.get(number) is None
    }
    return (
        pytree.tree_unflatten(leaves, nest),
        Sequences(total, rows_in(split), forms, frozenset(uncut - parts)),
    )


def as_tree(batch: Any) -> Any:
    """Return `batch`, as a dict if it is a mapping that torch's trees take for a leaf.

    An example is the output of a tokenizer of Transformers.
    """
    is_leaf = isinstance(batch, Mapping) and not isinstance(batch, dict)
    return dict(batch) if is_leaf else batch


def _named_leaves(batch: Any) -> tuple[list[tuple[Any, Any]], Any]:
    """Return the leaves of `batch` with their paths, and its structure.

    The leaves of an object without names for its fields are numbered.
    """
    try:
        return pytree.tree_flatten_with_path(batch)
    except ValueError:
        named: list[tuple[Any, Any]] = []
        for path, node in pytree.tree_flatten_with_path(batch, is_leaf=_is_nameless)[0]:
            if _is_nameless(node):
                leaves = enumerate(pytree.tree_leaves(node))
                named += [((*path, pytree.SequenceKey(n)), leaf) for n, leaf in leaves]
            else:
                named.append((path, node))
        return named, pytree.tree_structure(batch)


def _is_nameless(node: Any) -> bool:
    """Return whether the class of `node` is registered as a tree without names for its fields."""
    try:
        pytree.tree_flatten_with_path(node, is_leaf=lambda child: child is not node)
    except ValueError:
        return True
    return False


def _given_dims(
    named: Sequence[tuple[Any, Any]], dim: SequenceDim | None, call: str
) -> tuple[dict[int, int | None], dict[int, int]]:
    """Return the sequence dimensions that the user has passed, by the number of the tensor.

    The second dict holds tensors that could be masks by their shape. Its dimensions apply only if
    they turn out to be ordinary tensors.

    Raises DataError if a tensor does not have the dimension, or if no tensor has a name of `dim`.
    """
    chosen: dict[int, int | None] = {}
    beside: dict[int, int] = {}
    for each in dim.values() if isinstance(dim, Mapping) else [dim]:
        if each is not None and type(each) is not int:
            raise DataError(
                f"{call}: sequence_dim={dim!r} is not a dimension. Write a number such as "
                "sequence_dim=0, or sequence_dim={name: dimension, name: None}."
            )
    found = [_names_in(path, dim) for path, _ in named]
    if isinstance(dim, Mapping):
        used = {name for names in found for _, name in names}
        if unknown := [name for name in dim if name not in used]:
            raise DataError(
                f"{call}: sequence_dim names {unknown[0]!r}, but the batch has "
                f"{', '.join(pytree.keystr(path) for path, _ in named) or 'nothing'}."
            )
    for number, (path, leaf) in enumerate(named):
        if isinstance(dim, Mapping):
            if not found[number]:
                continue
            depth, name = found[number][-1]  # the innermost
            each, is_named = dim[name], depth == len(path) - 1
        else:
            each, is_named = dim, not path
        if each is None:
            if isinstance(dim, Mapping):
                chosen[number] = None
            continue
        # A tensor of one dimension is only split if `dim` names it.
        if not is_named and not (isinstance(leaf, Tensor) and leaf.ndim > DIM):
            continue
        if not isinstance(leaf, Tensor) or not -leaf.ndim <= each < leaf.ndim:
            shown = tuple(leaf.shape) if isinstance(leaf, Tensor) else type(leaf).__name__
            raise DataError(
                f"{call}: sequence_dim={each}, but batch{pytree.keystr(path)} is {shown}. Write "
                "the dimension of each tensor by its name: sequence_dim={name: dimension}."
            )
        may_be_mask = not is_named and _may_be_mask(leaf.shape)
        (beside if may_be_mask else chosen)[number] = each % leaf.ndim
    return chosen, beside


def _names_in(path: Sequence[Any], dim: SequenceDim | None) -> list[tuple[int, Any]]:
    """Return the names of `dim` in the `path` to a tensor, with their places, the outermost first.

    A number is a position in the batch itself.
    """
    if not isinstance(dim, Mapping):
        return []
    keys = list(enumerate(map(_key_of, path)))
    return [(n, key) for n, key in keys if key in dim and (n == 0 or not isinstance(key, int))]


def _key_of(step: Any) -> Any:
    """Return the name or position that a `step` of a path into a batch stands for."""
    return getattr(step, "key", getattr(step, "idx", getattr(step, "name", None)))


def _may_be_mask(shape: Sequence[int]) -> bool:
    return len(shape) == 4 and (shape[2] == shape[3] or shape[1] == shape[2] == 1)
