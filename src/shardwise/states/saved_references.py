"""Saved-tensor references: what autograd saves instead of the memory of gathered parameters.

A gathered bucket must not be kept from forward to backward. So of a tensor that lies in one,
autograd saves where it lies (a `BucketReference`), and backward gathers the bucket again.
"""

from __future__ import annotations

from bisect import bisect, insort
from operator import itemgetter

import torch
from torch import Tensor

from shardwise.model.unit_hooks import SavedReference

Form = tuple[int, torch.Size, tuple[int, ...], torch.dtype]
"""A tensor as it lies in a bucket: offset in elements of its dtype, shape, strides, dtype."""


class BucketReference(SavedReference):
    """Refers to a tensor in bucket `index` of unit `unit`, in a `generation` of its values."""

    __slots__ = ("form", "generation", "index", "unit")

    def __init__(self, unit: int, index: int, form: Form, generation: int) -> None:
        self.unit = unit
        self.index = index
        self.form = form
        self.generation = generation


def shaped(flat: Tensor, form: Form) -> Tensor:
    """What lies in `flat`, a whole bucket, in `form`."""
    offset, shape, stride, dtype = form
    flat = flat if flat.dtype == dtype else flat.view(dtype)
    return flat.as_strided(shape, stride, flat.storage_offset() + offset)


_Range = tuple[int, int, int, int]
"""First address, end, unit, index."""


class BucketAddresses:
    """Finds by address which whole bucket a tensor lies in; `generation` counts up when values
    change."""

    def __init__(self) -> None:
        self.generation = 0
        self._ranges: list[_Range] = []
        self._firsts: list[int] = []

    def add(self, flat: Tensor, unit: int, index: int) -> None:
        """Register `flat`, which holds bucket `index` of unit `unit`."""
        if flat.numel():
            first = flat.data_ptr()
            insort(self._ranges, (first, first + flat.nbytes, unit, index), key=itemgetter(0))
            insort(self._firsts, first)

    def remove(self, flat: Tensor) -> None:
        """Unregister `flat`."""
        if flat.numel():
            place = bisect(self._firsts, flat.data_ptr()) - 1
            del self._ranges[place], self._firsts[place]

    def find(self, tensor: Tensor) -> BucketReference | None:
        """Refer to `tensor` where it lies in a whole bucket; None for any other memory. Called for
        all that autograd saves."""
        try:
            address = tensor.data_ptr()
        except RuntimeError:  # it has none: sparse, or a wrapper
            return None
        place = bisect(self._firsts, address) - 1
        if place < 0:
            return None
        first, end, unit, index = self._ranges[place]
        if address >= end:
            return None
        offset = (address - first) // tensor.element_size()
        form = offset, tensor.shape, tensor.stride(), tensor.dtype
        return BucketReference(unit, index, form, self.generation)
