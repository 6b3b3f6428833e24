"""The rows of a batch: a nest of tensors, numpy arrays and columns of plain values.

A *column* is a list or tuple of plain values (texts, numbers), one for each row. A list or tuple
that has a tensor or an array somewhere inside is a part of the nest, as are dicts and named tuples.
Sparse tensors have rows as dense ones do. The rows of a nested tensor are its components.
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
"""What has a length and is no column: it stays as it is."""

_PLAIN_VALUES = (str, bytes, int, float, type(None))
"""What is written alike in every process; an object may have its address in its `repr`."""


class Rows:
    """A nest and the number of rows of it, counted along `dim` in tensors and arrays.

    Raises DataError, in the name of `call`, where what is in the nest does not agree on one number,
    and for what has rows that cannot be told: at once, and whatever part is taken.
    """

    def __init__(self, batch: Any, dim: int = 0, *, call: str) -> None:
        self._batch = batch
        self._leaves, self._nest = pytree.tree_flatten(batch, is_leaf=_is_leaf)
        self._dim = dim
        self._call = call
        for number, leaf in enumerate(self._leaves):
            self._check_layout(number, leaf)
        self.total = self._counted()
        self.taken(0, 1)

    def taken(self, first: int, end: int) -> Any:
        """Rows [first, end); the first one where that is none. Tensors are contiguous where those
        of the batch are."""
        if end == first:
            first, end = 0, 1
        parts = [self._part(n, leaf, slice(first, end)) for n, leaf in enumerate(self._leaves)]
        return pytree.tree_unflatten(parts, self._nest)

    def digest(self) -> float | Tensor:
        """A number that tells the first row from others, on the device where that is a tensor."""
        number: float | Tensor = 0.0
        for leaf in self._leaves:
            if isinstance(leaf, Tensor) and leaf.layout is torch.strided and not leaf.is_nested:
                number = number + _digest(leaf.narrow(self._dim, 0, 1).detach())
            elif isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biuf":
                row = np.ascontiguousarray(leaf.take([0], axis=self._dim).astype(np.float64))
                number = number + _digest(torch.from_numpy(row))
            elif _is_column(leaf) and isinstance(leaf[0], _PLAIN_VALUES):
                number = number + zlib.crc32(repr(leaf[0]).encode()) / 2**32
        return number

    def _counted(self) -> int:
        """How many rows there are: tensors and arrays say it, where there are none the columns."""
        sizes = {n: _size(x, self._dim) for n, x in enumerate(self._leaves) if _has_dims(x)}
        sizes = sizes or {n: len(x) for n, x in enumerate(self._leaves) if _is_column(x)}
        if not sizes and _is_tuple_of_columns(self._batch):
            sizes = {0: len(self._batch[0])}
        found = sorted(set(sizes.values()))
        if len(found) == 1 and found != [0]:
            return found[0]
        if not sizes:
            for number, leaf in enumerate(self._leaves):
                self._refuse_hidden(number, leaf)
        first = {size: self._name(number) for number, size in reversed(sizes.items())}
        named = ", ".join(f"{first[size]}: {size}" for size in found)
        raise DataError(
            f"{self._call} takes tensors of one equal {dimension(self._dim)} above 0, not {found}"
            + (f" ({named})" if named else "")
            + ", and numpy arrays or lists of numbers or texts that have as many rows."
        )

    def _part(self, number: int, leaf: Any, place: slice) -> Any:
        if isinstance(leaf, Tensor):
            if leaf.is_nested:
                return torch.nested.as_nested_tensor(leaf.unbind()[place], layout=leaf.layout)
            if leaf.layout is not torch.strided:
                # Only COO can be narrowed; a compressed layout comes back from it as it was.
                whole: Tensor = leaf.to_sparse_coo()  # type: ignore[no-untyped-call]
                part = whole.narrow_copy(self._dim, place.start, place.stop - place.start)
                return part.to_sparse(layout=leaf.layout)
            part = leaf.narrow(self._dim, place.start, place.stop - place.start)
            return part.contiguous() if leaf.is_contiguous() else part
        if isinstance(leaf, np.ndarray):
            rows = leaf[(slice(None),) * (self._dim % leaf.ndim) + (place,)]
            return np.ascontiguousarray(rows) if leaf.flags.c_contiguous else rows
        if _is_plain(leaf):
            return self._part_of_plain(number, leaf, place)
        self._refuse_hidden(number, leaf)
        return leaf

    def _part_of_plain(self, number: int, leaf: Sequence[Any], place: slice) -> Any:
        """Of a list or tuple without tensors: one value for each row, or columns of so many."""
        of_rows, nest = len(leaf) == self.total, self._is_nest(leaf)
        if of_rows and not nest:
            return leaf[place]
        if nest and not of_rows:
            parts = (self._part_of_plain(number, each, place) for each in leaf)
            return type(leaf)(parts)  # type: ignore[call-arg]
        kind = type(leaf).__name__
        if nest:
            what = f"a {kind} of {len(leaf)} columns, and the batch has as many rows"
        else:
            what = f"a {kind} of length {len(leaf)}, and the batch has {self.total} row(s)"
        raise DataError(
            f"{self._call}: {self._name(number)} is {what}, so that it cannot be told what a row "
            "of it is. Give it as a tensor or a numpy array that has the batch's rows, or leave it "
            "out of the call where it has none."
        )

    def refuse_samples(self, batch: Any) -> None:
        """Raise DataError if `batch` has a list of tensors that may be samples.

        `[x1, x2, ...]` is cut like `[inputs, targets]`: each tensor by its first dimension. If the
        tensors are samples of one shape, that takes a part of each sample. Nothing in the list
        tells, except that a batch seldom has so many columns of one shape and dtype.
        """
        known = sum(map(_has_dims, self._leaves))
        for each in _lists_of_one_form(batch):
            inside = [leaf for leaf in pytree.tree_leaves(each) if _has_dims(leaf)]
            if len(inside) < known and len(each) != self.total:
                continue  # other parts have rows too, and as many as these columns
            raise DataError(
                f"{self._call}: a {type(each).__name__} of {len(each)} items, of shape "
                f"{tuple(inside[0].shape)} each, may be {len(each)} samples, or columns of "
                f"{self.total} rows. Write torch.stack(items) for samples, as the default "
                "collate_fn does, or give columns in a dict."
            )

    def _check_layout(self, number: int, leaf: Any) -> None:
        """Raise DataError for a tensor that cannot be cut along this dimension."""
        if not isinstance(leaf, Tensor):
            return
        if leaf.is_nested and self._dim != 0:
            what = "a nested tensor has rows along its first dimension only"
        elif leaf.layout in (torch.sparse_bsr, torch.sparse_bsc):
            what = f"a tensor of layout {leaf.layout} is made of blocks that rows would cut"
        else:
            return
        raise DataError(
            f"{self._call}: {self._name(number)} cannot be cut along {dimension(self._dim)}, since "
            f"{what}: give a dense tensor, or leave it out of the call."
        )

    def _is_nest(self, leaf: Any) -> bool:
        """Whether `leaf` holds nothing but columns with a value for each row."""
        if not leaf or not all(isinstance(each, (list, tuple)) for each in leaf):
            return False
        return all(len(each) == self.total or self._is_nest(each) for each in leaf)

    def _refuse_hidden(self, number: int, leaf: Any) -> None:
        """Raise DataError for an object that has rows, or tensors, which nobody can take apart."""
        inside = getattr(leaf, "__dict__", {}).values()
        has_tensors = any(isinstance(value, (Tensor, np.ndarray)) for value in inside)
        if isinstance(leaf, _WHOLE) or not (has_tensors or hasattr(leaf, "__len__")):
            return
        raise DataError(
            f"{self._call} cannot tell the rows of {self._name(number)}, a "
            f"{type(leaf).__name__}: give its tensors, arrays or lists in a tuple or a dict."
        )

    def _name(self, number: int) -> str:
        """What leaf `number` is called in messages."""
        try:
            leaves, _ = pytree.tree_flatten_with_path(self._batch, is_leaf=_is_leaf)
        except ValueError:  # a container of the user's own, which does not name its parts
            return f"part {number} of the batch"
        return f"batch{pytree.keystr(leaves[number][0])}"


def dimension(dim: int) -> str:
    """What a dimension is called in messages."""
    return "first dimension" if dim == 0 else f"dimension {dim}"


def _has_dims(leaf: Any) -> bool:
    return isinstance(leaf, (Tensor, np.ndarray))


_SEVERAL = 6
"""Tensors of one shape and dtype that are more likely samples than columns: a batch of a language
model has up to five (ids, mask, types, positions, labels)."""


def _lists_of_one_form(batch: Any) -> Iterator[Any]:
    """The lists and tuples in `batch` with several items that hold equally shaped tensors."""
    if isinstance(batch, dict):
        for value in batch.values():
            yield from _lists_of_one_form(value)
    elif isinstance(batch, (list, tuple)) and not isinstance(batch, torch.Size):
        forms = {_form(each) for each in batch} if len(batch) >= _SEVERAL else set()
        if len(forms) == 1 and forms != {()} and not hasattr(batch, "_fields"):
            yield batch
        for each in batch:
            yield from _lists_of_one_form(each)


def _form(item: Any) -> tuple[Any, ...]:
    """The shapes and dtypes of the tensors and arrays in `item` that have dimensions."""
    found = (leaf for leaf in pytree.tree_leaves(item) if _has_dims(leaf))
    return tuple((tuple(x.shape), x.dtype) for x in found if x.ndim and not _is_nested(x))


def _is_nested(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_nested


def _size(leaf: Any, dim: int) -> int:
    """The size in dimension `dim`; 0 without it."""
    if _is_nested(leaf):
        return int(leaf.size(0))
    return int(leaf.shape[dim]) if -leaf.ndim <= dim < leaf.ndim else 0


_DIGESTED = 4096
"""Elements of a row that are looked at."""


def _digest(row: Tensor) -> Tensor:
    """A sum in which elements have different weights, so that their order matters."""
    flat = torch.view_as_real(row).flatten() if row.is_complex() else row.flatten()
    values = flat[:_DIGESTED].to(torch.float32 if row.device.type == "mps" else torch.float64)
    weights = torch.arange(len(values), device=values.device) % 61 + 61
    return (values.abs().nan_to_num(0.0, 0.0).clamp(max=1e30) * weights).sum()


def _is_leaf(value: Any) -> bool:
    return isinstance(value, torch.Size) or _is_plain(value)


def _is_plain(value: Any) -> bool:
    """Whether a list or tuple has no tensor and no array inside, and something."""
    if not isinstance(value, (list, tuple)) or isinstance(value, torch.Size):
        return False
    if hasattr(value, "_fields"):
        return False
    inside = pytree.tree_leaves(value)
    return bool(inside) and not any(map(_has_dims, inside))


def _is_column(value: Any) -> bool:
    return _is_plain(value) and not any(isinstance(each, (list, tuple, dict)) for each in value)


def _is_tuple_of_columns(value: Any) -> bool:
    """Whether a whole batch is a tuple of columns, such as texts and labels."""
    return isinstance(value, tuple) and all(_is_column(each) for each in value)
