"""Defines the references that autograd saves in place of gathered parameters.

A gathered bucket must not stay in memory from the forward to the backward pass. For a tensor in
such a bucket, autograd therefore saves its position (a `BucketReference`), and the backward pass
gathers the bucket again. A reference can also stand for a parameter's 16-bit cast, which autocast
creates. The backward pass then repeats the cast.
"""

from __future__ import annotations

from bisect import bisect, insort
from operator import itemgetter

import torch
from torch import Tensor

from shardwise.model.precision import NARROW
from shardwise.model.unit_hooks import SavedReference

Form = tuple[int, torch.Size, tuple[int, ...], torch.dtype]
"""Geometry of a view: offset in elements of its dtype, shape, strides, dtype."""


class BucketReference(SavedReference):
    """A reference to a tensor in bucket `index` of unit `unit`, or to a cast of that tensor.

    `form` is the tensor's geometry in the bucket. `cast` is the saved tensor's geometry in the
    cast's memory, or None if the saved tensor is not a cast. The reference is valid until the
    parameters change. Each change increments `generation`.
    """

    __slots__ = ("cast", "form", "generation", "index", "unit")

    def __init__(self, unit: int, index: int, form: Form, generation: int) -> None:
        self.unit = unit
        self.index = index
        self.form = form
        self.generation = generation
        self.cast: Form | None = None

    def of(self, view: Tensor) -> Tensor:
        """Return the saved tensor. `view` is the bucket's view with the geometry `form`."""
        if self.cast is None:
            return view
        with torch.no_grad():
            return view_in_form(view.to(self.cast[-1]), self.cast)


def view_in_form(flat: Tensor, form: Form) -> Tensor:
    """Return a view of the full bucket `flat` with the geometry `form`."""
    offset, shape, stride, dtype = form
    flat = flat if flat.dtype == dtype else flat.view(dtype)
    return flat.as_strided(shape, stride, flat.storage_offset() + offset)


class CastCache:
    """Clears autocast's cache after each unit's forward pass, to free the cast weights.

    Otherwise autocast keeps all casts until the forward pass ends. If the cache is cleared between
    two uses of the same weight, the weight is cast twice. Its gradients are then summed in fp32
    instead of 16 bits, so the result is no longer bit-identical to that of placements that do not
    shard parameters. The first forward pass shows whether a weight is used more than once. If so,
    the cache is never cleared.
    """

    def __init__(self) -> None:
        self._first: dict[int, int] = {}
        """Parameter id -> number of units that had finished when its cast was first saved."""
        self._left = 0
        self._units: set[int] = set()
        """The units that have finished in this forward pass."""
        self._forwards = 0
        self._is_used_again = False

    def begin(self) -> None:
        """Start a forward pass of the full model."""
        self._first.clear()  # it may contain entries from a recomputation
        self._units.clear()
        self._left = 0

    def note_saved(self, parameter: Tensor) -> None:
        """Record that autograd has saved a cast of `parameter`."""
        if self._first.setdefault(id(parameter), self._left) != self._left:
            self._is_used_again = True

    def leave_unit(self, number: int) -> None:
        """Clear the cache if that is safe. Call when the forward pass leaves unit `number`."""
        if not torch._C._is_any_autocast_enabled():
            return
        self._left += 1
        self._is_used_again = self._is_used_again or number in self._units
        self._units.add(number)
        recording = torch.is_grad_enabled()
        # Without autograd there are no gradients whose bits could differ.
        if not recording or (self._forwards and not self._is_used_again):
            torch.clear_autocast_cache()

    def end(self) -> None:
        """Finish a forward pass. It counts only if autocast and autograd were enabled."""
        self._forwards += bool(self._left and torch.is_grad_enabled())


_Range = tuple[int, int, int, int]
"""First address, end address, unit, bucket index."""


class BucketAddresses:
    """Finds the gathered bucket that contains a tensor, by the tensor's address."""

    def __init__(self) -> None:
        self.generation = 0
        """Incremented when parameter values change."""
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
        if flat.numel():
            place = bisect(self._firsts, flat.data_ptr()) - 1
            del self._ranges[place], self._firsts[place]

    def find(self, tensor: Tensor) -> BucketReference | None:
        """Return a reference to `tensor`, or None if it is not in the memory of a gathered bucket.

        Also recognises casts of parameters. Called for every tensor that autograd saves.
        """
        try:
            address = tensor.data_ptr()
        except RuntimeError:  # no address: sparse tensors and wrappers
            return None
        found = self._at(address, tensor)
        return self._cast(tensor) if found is None and tensor.dtype in NARROW else found

    def _cast(self, tensor: Tensor) -> BucketReference | None:
        """Return a reference to `tensor` if it is a parameter's 16-bit cast, or a view of one."""
        cast = tensor if tensor._base is None else tensor._base
        if cast.dtype != tensor.dtype:  # a view of the bits as a different dtype
            return None
        parameter = cast_parameter(cast)
        if parameter is None or (found := self._at(parameter.data_ptr(), parameter)) is None:
            return None
        found.cast = int(tensor.storage_offset()), tensor.shape, tensor.stride(), tensor.dtype
        self.casts.note_saved(parameter)
        return found

    def _at(self, address: int, tensor: Tensor) -> BucketReference | None:
        # Buckets do not overlap, so only the last one that starts at or before `address` can
        # contain it.
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
    """Return the parameter from which `cast` was created, or None.

    Autograd's graph records the cast. `parameter.to(cast.dtype)` gives the same values, shape and
    strides again.
    """
    node = cast.grad_fn
    if node is None or node.name() != "ToCopyBackward0":
        return None
    parameter: Tensor | None = getattr(node.next_functions[0][0], "variable", None)
    if parameter is None or cast._version or cast.device != parameter.device:
        return None  # not the cast of a leaf, written to since, or moved to a different device
    same_form = cast.shape == parameter.shape and cast.stride() == parameter.stride()
    dense = cast.untyped_storage().nbytes() == cast.numel() * cast.element_size()
    return parameter if same_form and dense else None
