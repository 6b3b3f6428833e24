"""Where the memory of shown parameters is, so that autograd can keep a note instead of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Place:
    """A tensor as it lies in bucket `index` of unit `unit`."""

    unit: int
    index: int
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    def of(self, flat: Tensor) -> Tensor:
        """The tensor in `flat`, the whole bucket."""
        flat = flat if flat.dtype == self.dtype else flat.view(self.dtype)
        return flat.as_strided(self.shape, self.stride, flat.storage_offset() + self.offset)


@dataclass(frozen=True)
class _Range:
    first: int
    end: int
    unit: int
    index: int


class Places:
    """The whole buckets that are in memory now, found by address."""

    def __init__(self) -> None:
        self._ranges: dict[int, list[_Range]] = {}

    def add(self, flat: Tensor, unit: int, index: int) -> None:
        """`flat` holds bucket `index` of unit `unit`."""
        first = flat.data_ptr()
        found = _Range(first, first + flat.nbytes, unit, index)
        self._ranges.setdefault(flat.untyped_storage().data_ptr(), []).append(found)

    def remove(self, flat: Tensor) -> None:
        """It does no longer."""
        storage, first = flat.untyped_storage().data_ptr(), flat.data_ptr()
        self._ranges[storage] = [each for each in self._ranges[storage] if each.first != first]

    def find(self, tensor: Tensor) -> Place | None:
        """Where `tensor` lies; None for any other memory."""
        if tensor.layout != torch.strided:
            return None
        ranges = self._ranges.get(tensor.untyped_storage().data_ptr())
        if not ranges:
            return None
        address = tensor.data_ptr()
        for each in ranges:
            if each.first <= address < each.end:
                offset = (address - each.first) // tensor.element_size()
                form = tensor.shape, tensor.stride(), tensor.dtype
                return Place(each.unit, each.index, offset, *form)
        return None
