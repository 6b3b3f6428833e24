"""Finds the rows of a batch: nested containers of tensors, arrays and columns of plain values.

A *column* is a list or tuple of plain values (strings, numbers), one per row. A list or tuple that
contains a tensor or an array at any depth is a container, as are dicts and named tuples. Sparse
tensors have rows just like dense ones. The rows of a nested tensor are its components.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shardwise.errors import DataError

_WHOLE = (str, bytes, bytearray, torch.Size)
"""Types with a length that are not columns. Every rank gets them unchanged."""

_PLAIN_VALUES = (str, bytes, int, float, type(None))
"""Types with the same `repr` in every process. The `repr` of other objects may contain an
address."""


class Rows:
    """The rows of a nested batch, counted along `dim` in tensors and arrays.

    The constructor raises DataError, naming `call`, if parts of the batch have different numbers of
    rows, or if the rows of a part cannot be determined. It checks the whole batch, so every rank
    raises the same error, regardless of which rows it takes later.
    """

    def __init__(self, batch: Any, dim: int = 0, *, call: str) -> None:
        self._batch = batch
        self._leaves, self._nest = pytree.tree_flatten(batch, is_leaf=_is_leaf)
        self._dim = dim
        self._call = call
        for number, leaf in enumerate(self._leaves):
            self._check_layout(number, leaf)
        self.total = self._count()
        self.taken(0, 1)  # raises for parts whose rows cannot be determined

    def taken(self, first: int, end: int) -> Any:
        """Return rows [first, end). If the range is empty, return row 0 as a stand-in.

        Each returned tensor is contiguous if the batch's tensor is.
        """
        # A rank without rows still needs one, to run the collectives of its forward pass.
        if end == first:
            first, end = 0, 1
        parts = [self._part(n, leaf, slice(first, end)) for n, leaf in enumerate(self._leaves)]
        return pytree.tree_unflatten(parts, self._nest)

    def digest(self) -> float | Tensor:
        """Return a number that depends on the batch's first row (a tensor on an accelerator)."""
        number: float | Tensor = 0.0
        for leaf in self._leaves:
            if isinstance(leaf, Tensor) and leaf.layout is torch.strided and not leaf.is_nested:
                number = number + _digest(leaf.narrow(self._dim, 0, 1).detach())
            elif isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biuf":
                row = np.ascontiguousarray(leaf.take([0], axis=self._dim).astype(np.float64))
                number = number + _digest(torch.from_numpy(row))
            elif _is_column(leaf) and isinstance(leaf[0], _PLAIN_VALUES):
                # Scale to below 1, so that it does not dominate the digests of tensors.
                number = number + zlib.crc32(repr(leaf[0]).encode()) / 2**32
        return number

    def _count(self) -> int:
        """Return the number of rows in the tensors and arrays, or in the columns if it has none."""
        sizes = {n: _size(x, self._dim) for n, x in enumerate(self._leaves) if _has_dims(x)}
        # Count plain lists only if there are no tensors, because they may mean something else.
        sizes = sizes or {n: len(x) for n, x in enumerate(self._leaves) if _is_column(x)}
        # A tuple of columns, such as texts and labels, is a single leaf without tensors.
        is_tuple = isinstance(self._batch, tuple)
        if not sizes and is_tuple and all(map(_is_column, self._batch)):
            sizes = {0: len(self._batch[0])}
        distinct = sorted(set(sizes.values()))
        if len(distinct) == 1 and distinct != [0]:
            return distinct[0]
        if not sizes:
            for number, leaf in enumerate(self._leaves):
                self._refuse_hidden(number, leaf)
        first = {size: self._name(number) for number, size in reversed(sizes.items())}
        named = ", ".join(f"{first[size]}: {size}" for size in distinct)
        raise DataError(
            f"{self._call} takes tensors of the same {dimension(self._dim)} above 0, not "
            f"{distinct}{f' ({named})' if named else ''}. numpy arrays, and lists of numbers or "
            "strings, must have the same number of rows."
        )

    def _part(self, number: int, leaf: Any, place: slice) -> Any:
        if isinstance(leaf, Tensor):
            if leaf.is_nested:
                return torch.nested.as_nested_tensor(leaf.unbind()[place], layout=leaf.layout)
            if leaf.layout is not torch.strided:
                # Only COO tensors can be narrowed, so convert compressed layouts to COO and back.
                whole: Tensor = leaf.to_sparse_coo()  # type: ignore[no-untyped-call]
                part = whole.narrow_copy(self._dim, place.start, place.stop - place.start)
                return part.to_sparse(layout=leaf.layout)
            part = leaf.narrow(self._dim, place.start, place.stop - place.start)
            # Rows along dim > 0 are strided views, which some kernels would copy at every use.
            return part.contiguous() if leaf.is_contiguous() else part
        if isinstance(leaf, np.ndarray):
            rows = leaf[(slice(None),) * (self._dim % leaf.ndim) + (place,)]
            return np.ascontiguousarray(rows) if leaf.flags.c_contiguous else rows
        if _is_plain(leaf):
            return self._part_of_plain(number, leaf, place)
        self._refuse_hidden(number, leaf)
        return leaf

    def _part_of_plain(self, number: int, leaf: Sequence[Any], place: slice) -> Any:
        """Return the rows `place` of a column or of nested columns (sequences without tensors)."""
        is_column, has_columns = len(leaf) == self.total, self._is_nest(leaf)
        if is_column and not has_columns:
            return leaf[place]
        if has_columns and not is_column:
            parts = (self._part_of_plain(number, each, place) for each in leaf)
            return type(leaf)(parts)  # type: ignore[call-arg]
        kind = type(leaf).__name__
        if has_columns:
            found = f"a {kind} of {len(leaf)} columns, and the batch has the same number of rows"
        else:
            found = f"a {kind} of length {len(leaf)}, and the batch has {self.total} row(s)"
        raise DataError(
            f"{self._call}: {self._name(number)} is {found}, so its rows are ambiguous. Pass it as "
            "a tensor or numpy array with the rows of the batch, or leave it out of the call if it "
            "has no rows."
        )

    def refuse_samples(self, batch: Any) -> None:
        """Raise DataError if `batch` contains a list of tensors that may be samples.

        `[x1, x2, ...]` is split like `[inputs, targets]`: each tensor along its first dimension. If
        the tensors are samples of the same shape, this would take a part of each sample. The only
        sign of this mistake is the shapes: a batch rarely has many columns of the same shape and
        dtype.
        """
        known = sum(map(_has_dims, self._leaves))
        for each in _lists_of_one_form(batch):
            inside = [leaf for leaf in pytree.tree_leaves(each) if _has_dims(leaf)]
            if len(inside) < known and len(each) != self.total:
                continue  # other parts of the batch confirm the number of rows
            raise DataError(
                f"{self._call}: a {type(each).__name__} of {len(each)} items, of shape "
                f"{tuple(inside[0].shape)} each, may be {len(each)} samples, or columns of "
                f"{self.total} rows. Write torch.stack(items) for samples, as the default "
                "collate_fn does, or pass columns in a dict."
            )

    def _check_layout(self, number: int, leaf: Any) -> None:
        """Raise DataError if a tensor cannot be split along this dimension."""
        if not isinstance(leaf, Tensor):
            return
        if leaf.is_nested and self._dim != 0:
            reason = "a nested tensor has rows along its first dimension only"
        elif leaf.layout in (torch.sparse_bsr, torch.sparse_bsc):
            reason = f"a row would cut the blocks of a tensor of layout {leaf.layout}"
        else:
            return
        raise DataError(
            f"{self._call}: {self._name(number)} cannot be cut along {dimension(self._dim)}: "
            f"{reason}. Pass a dense tensor, or leave it out of the call."
        )

    def _is_nest(self, leaf: Any) -> bool:
        """Return whether `leaf` contains only columns with one value per row."""
        if not leaf or not all(isinstance(each, (list, tuple)) for each in leaf):
            return False
        return all(len(each) == self.total or self._is_nest(each) for each in leaf)

    def _refuse_hidden(self, number: int, leaf: Any) -> None:
        """Raise DataError if `leaf` has a length or tensors, but is not a known container."""
        inside = getattr(leaf, "__dict__", {}).values()
        has_tensors = any(isinstance(value, (Tensor, np.ndarray)) for value in inside)
        # An object without rows, such as a setting, is passed to every rank unchanged.
        if isinstance(leaf, _WHOLE) or not (has_tensors or hasattr(leaf, "__len__")):
            return
        raise DataError(
            f"{self._call} cannot determine the rows of {self._name(number)}, a "
            f"{type(leaf).__name__}: pass its tensors, arrays or lists in a tuple or a dict."
        )

    def _name(self, number: int) -> str:
        """Return the name of leaf `number` for messages, such as `batch['ids']`."""
        try:
            leaves, _ = pytree.tree_flatten_with_path(self._batch, is_leaf=_is_leaf)
        except ValueError:  # a container registered by the user, whose parts have no names
            return f"part {number} of the batch"
        return f"batch{pytree.keystr(leaves[number][0])}"


def dimension(dim: int) -> str:
    """Return the name of a dimension for messages."""
    return "first dimension" if dim == 0 else f"dimension {dim}"


def _has_dims(leaf: Any) -> bool:
    return isinstance(leaf, (Tensor, np.ndarray))


_SEVERAL = 6
"""Lists with at least this many tensors of the same shape and dtype are assumed to hold samples. A
language model's batch has up to five columns (ids, mask, types, positions, labels)."""


def _lists_of_one_form(batch: Any) -> Iterator[Any]:
    """Yield the lists and tuples in `batch` with at least `_SEVERAL` items of the same form."""
    if isinstance(batch, dict):
        for value in batch.values():
            yield from _lists_of_one_form(value)
    elif isinstance(batch, (list, tuple)) and not isinstance(batch, torch.Size):
        forms = {_form(each) for each in batch} if len(batch) >= _SEVERAL else set()
        # A named tuple's fields have names, so they are columns.
        if len(forms) == 1 and forms != {()} and not hasattr(batch, "_fields"):
            yield batch
        for each in batch:
            yield from _lists_of_one_form(each)


def _form(item: Any) -> tuple[Any, ...]:
    """Return the shapes and dtypes of all tensors and arrays in `item` that are not scalars."""
    found = (leaf for leaf in pytree.tree_leaves(item) if _has_dims(leaf))
    return tuple((tuple(x.shape), x.dtype) for x in found if x.ndim and not _is_nested(x))


def _is_nested(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_nested


def _size(leaf: Any, dim: int) -> int:
    """Return the size of dimension `dim`, or 0 if `leaf` does not have this dimension."""
    if _is_nested(leaf):
        return int(leaf.size(0))
    return int(leaf.shape[dim]) if -leaf.ndim <= dim < leaf.ndim else 0


_DIGESTED = 4096
"""Maximum number of a row's elements that its digest uses."""


def _digest(row: Tensor) -> Tensor:
    """Return a weighted sum of the row's elements, which depends on their order."""
    # Weight the elements, so that rows with the same elements in a different order differ. Use only
    # the first elements, because this runs at every step. float64, which MPS lacks, keeps the sum
    # accurate.
    flat = torch.view_as_real(row).flatten() if row.is_complex() else row.flatten()
    values = flat[:_DIGESTED].to(torch.float32 if row.device.type == "mps" else torch.float64)
    weights = torch.arange(len(values), device=values.device) % 61 + 61
    return (values.abs().nan_to_num(0.0, 0.0).clamp(max=1e30) * weights).sum()


def _is_leaf(value: Any) -> bool:
    return isinstance(value, torch.Size) or _is_plain(value)


def _is_plain(value: Any) -> bool:
    """Return whether `value` is a non-empty list or tuple without tensors or arrays inside."""
    if not isinstance(value, (list, tuple)) or isinstance(value, torch.Size):
        return False
    if hasattr(value, "_fields"):
        return False
    inside = pytree.tree_leaves(value)
    return bool(inside) and not any(map(_has_dims, inside))


def _is_column(value: Any) -> bool:
    return _is_plain(value) and not any(isinstance(each, (list, tuple, dict)) for each in value)
