"""Saved-tensor references: what autograd saves instead of the memory of gathered parameters.

A gathered bucket must not be kept from forward to backward. So of a tensor that lies in one,
autograd saves where it lies (a `BucketReference`), and backward gathers the bucket again. The same
holds for the 16-bit cast that autocast makes of a trained parameter: backward casts it again.
"""

from __future__ import annotations

from bisect import bisect, insort
from operator import itemgetter

import torch
from torch import Tensor

from shardwise.model.precision import NARROW
from shardwise.model.unit_hooks import SavedReference

Form = tuple[int, torch.Size, tuple[int, ...], torch.dtype]
"""A tensor as it lies in other memory: offset in elements of its dtype, shape, strides, dtype."""


class BucketReference(SavedReference):
    """Refers to a tensor in bucket `index` of unit `unit`, in a `generation` of its values; or, in
    the form `cast`, to a cast of that tensor."""

    __slots__ = ("cast", "form", "generation", "index", "unit")

    def __init__(self, unit: int, index: int, form: Form, generation: int) -> None:
        self.unit = unit
        self.index = index
        self.form = form
        self.generation = generation
        self.cast: Form | None = None

    def of(self, lying: Tensor) -> Tensor:
        """The tensor that was saved, `lying` being what lies in the bucket in `form`."""
        if self.cast is None:
            return lying
        with torch.no_grad():
            return shaped(lying.to(self.cast[-1]), self.cast)


def shaped(flat: Tensor, form: Form) -> Tensor:
    """What lies in `flat`, a whole bucket, in `form`."""
    offset, shape, stride, dtype = form
    flat = flat if flat.dtype == dtype else flat.view(dtype)
    return flat.as_strided(shape, stride, flat.storage_offset() + offset)


class CastCache:
    """Empties autocast's cache when a forward leaves a unit; else all casts stay until its end.

    A weight that is used on both sides of such a moment would be cast twice, and its gradients meet
    in fp32 rather than in 16 bits: other bits than those of rows that keep parameters whole. So a
    first forward shows whether there is such a weight, and with one the cache is left alone.
    """

    def __init__(self) -> None:
        self._first: dict[int, int] = {}
        """By parameter, how many units had been left when its cast was first saved."""
        self._left = 0
        self._units: set[int] = set()
        """Those that have been left."""
        self._forwards = 0
        self._is_used_again = False

    def begin(self) -> None:
        """A forward of the whole model begins."""
        self._first.clear()  # of a recomputation, too
        self._units.clear()
        self._left = 0

    def saw(self, parameter: Tensor) -> None:
        """A cast of `parameter` was saved."""
        if self._first.setdefault(id(parameter), self._left) != self._left:
            self._is_used_again = True

    def left(self, number: int) -> None:
        """The forward has left unit `number`."""
        if not torch._C._is_any_autocast_enabled():
            return
        self._left += 1
        self._is_used_again = self._is_used_again or number in self._units
        self._units.add(number)
        recording = torch.is_grad_enabled()
        if not recording or (self._forwards and not self._is_used_again):
            torch.clear_autocast_cache()

    def end(self) -> None:
        """The forward has ended."""
        self._forwards += bool(self._left and torch.is_grad_enabled())


_Range = tuple[int, int, int, int]
"""First address, end, unit, index."""


class BucketAddresses:
    """Finds by address which whole bucket a tensor lies in; `generation` counts up when values
    change."""

    def __init__(self) -> None:
        self.generation = 0
        self.casts = CastCache()
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
        """Refer to `tensor` where it lies in a whole bucket, or in the cast of what does; None for
        any other memory. Called for all that autograd saves."""
        try:
            address = tensor.data_ptr()
        except RuntimeError:  # it has none: sparse, or a wrapper
            return None
        found = self._at(address, tensor)
        return self._cast(tensor) if found is None and tensor.dtype in NARROW else found

    def _cast(self, tensor: Tensor) -> BucketReference | None:
        """Refer to `tensor` where it is a 16-bit cast of a trained parameter, or a view of one."""
        cast = tensor if tensor._base is None else tensor._base
        if cast.dtype != tensor.dtype:  # its bits, seen as another type
            return None
        parameter = cast_parameter(cast)
        if parameter is None or (found := self._at(parameter.data_ptr(), parameter)) is None:
            return None
        found.cast = int(tensor.storage_offset()), tensor.shape, tensor.stride(), tensor.dtype
        self.casts.saw(parameter)
        return found

    def _at(self, address: int, tensor: Tensor) -> BucketReference | None:
        place = bisect(self._firsts, address) - 1
        if place < 0:
            return None
        first, end, unit, index = self._ranges[place]
        if address >= end:
            return None
        offset = (address - first) // tensor.element_size()
        form = offset, tensor.shape, tensor.stride(), tensor.dtype
        return BucketReference(unit, index, form, self.generation)


def cast_parameter(cast: Tensor) -> Tensor | None:
    """The parameter of which `cast` is a copy in another dtype, as autograd has recorded; None
    where it is none. The copy's values, shape and strides are those that `parameter.to` gives."""
    made_by = cast.grad_fn
    if made_by is None or made_by.name() != "ToCopyBackward0":
        return None
    parameter: Tensor | None = getattr(made_by.next_functions[0][0], "variable", None)
    if parameter is None or cast._version or cast.device != parameter.device:
        return None  # of no leaf, written to since, or on its way to another device
    alike = cast.shape == parameter.shape and cast.stride() == parameter.stride()
    dense = cast.untyped_storage().nbytes() == cast.numel() * cast.element_size()
    return parameter if alike and dense else None
