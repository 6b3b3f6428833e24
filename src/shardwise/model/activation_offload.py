"""Offloads tensors that autograd saves, and prefetches them for the backward pass.

`pack` and `unpack` are hooks for torch.autograd.graph.saved_tensors_hooks. They move ranges of
memory (pieces), so that views of the same storage (query, key and value) are moved only once. The
backward pass needs saved tensors in reverse order. When it requests a piece, the pieces that were
saved before that piece are prefetched.

A piece holds the values at the time of saving. If the tensor is changed in place before its values
have been copied, `unpack` raises an error, as torch does.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection, Iterable
from typing import Any
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from shardwise.errors import UsageError
from shardwise.model.offloaded_tensor import Offload, OffloadTarget
from shardwise.tiers import host_memory

_StorageWeakRef: Any = StorageWeakRef  # torch gives it no types

LEAST = 64 * 1024
"""Minimum size in bytes. Smaller tensors stay in place."""

LEAVING = 64 * 2**20
"""Maximum size of pending copies in bytes. Beyond it, the forward pass waits for the oldest
copy."""

AHEAD = 64 * 2**20
"""Maximum size in bytes of prefetched or reusable pieces. A single piece may be larger."""

_WASTE = 8
"""A view's full storage is moved if it is at most this many times larger than the view."""

_SEARCH = 64
"""Number of pieces to search backwards for the next one to prefetch."""

_Key = tuple[int, int, int, int]
"""Storage, version, first byte and size in bytes."""


class Kept:
    """A tensor that stays in place. Its version must not change before the backward pass."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.version = tensor._version

    def value(self) -> Tensor:
        if self.tensor._version != self.version:
            raise _changed(self.tensor.dtype, self.tensor.shape)
        return self.tensor


class _Piece:
    """A range of a storage that is being copied out, is offloaded, or has been copied back.

    It is freed once no saved tensor needs it anymore.
    """

    def __init__(self, number: int, key: _Key, source: Tensor, offload: Offload) -> None:
        self.number = number
        # Keep the address from being reused by a new storage, because pieces are keyed by address.
        self.storage = _StorageWeakRef(source.untyped_storage())
        self.version, self.first, self.nbytes = key[1:]
        self.source: Tensor | None = source
        """Keeps the memory alive until the copy has completed."""
        self.offload = offload
        self.is_back = self.was_used = self.was_changed = False

    def settle(self) -> None:
        """Wait until the data has been copied out, and release the source memory.

        Call this only from the thread that runs the forward or backward pass. From another
        thread, it would not detect a concurrent in-place change.
        """
        if self.source is None:
            return
        self.offload.settle()
        self.was_changed = self.source._version != self.version
        self.source = None


class _MovedTensor:
    """A saved tensor that is a view of a piece."""

    __slots__ = ("dtype", "offset", "piece", "shape", "stride")

    def __init__(self, piece: _Piece, tensor: Tensor) -> None:
        self.piece = piece
        self.dtype = tensor.dtype
        self.shape, self.stride = tensor.shape, tensor.stride()
        # In elements, relative to the piece's first byte.
        self.offset = tensor.storage_offset() - piece.first // tensor.element_size()

    def view(self, data: Tensor) -> Tensor:
        """Return the tensor as a view of `data`, the piece's memory."""
        start = data.storage_offset() // self.dtype.itemsize + self.offset
        empty = torch.empty(0, dtype=self.dtype, device=data.device)
        return empty.set_(data.untyped_storage(), start, self.shape, self.stride)


class SavedTensors:
    """Offloads tensors saved for the backward pass to `target`. `pack` and `unpack` are its hooks.

    Only memory on devices of `device_type` is moved. Tensors smaller than LEAST bytes, parameters
    and buffers stay in place.
    """

    def __init__(self, target: OffloadTarget, device_type: str) -> None:
        self._target = target
        self._device_type = device_type
        self._staying: Collection[int] = frozenset()
        self._numbers = 0
        self._by_number: WeakValueDictionary[int, _Piece] = WeakValueDictionary()
        self._by_key: WeakValueDictionary[_Key, _Piece] = WeakValueDictionary()
        self._leaving: deque[tuple[ref[_Piece], int]] = deque()
        self._leaving_bytes = 0
        self._freed = 0
        self._back: OrderedDict[int, ref[_Piece]] = OrderedDict()

    def begin(self, models: Iterable[nn.Module]) -> None:
        """Begin a forward pass. The parameters and buffers of `models` stay in place."""
        held = (t for model in models for t in (*model.parameters(), *model.buffers()))
        # Collect these for each forward pass, because the layout of parameters may change between
        # steps.
        self._staying = {t.untyped_storage().data_ptr() for t in held if type(t) in _PLAIN}

    # -- forward --------------------------------------------------------------------------

    def pack(self, tensor: Tensor) -> Kept | _MovedTensor:
        """Return what autograd stores in place of `tensor`."""
        if (key := self._key(tensor)) is None:
            return Kept(tensor)
        self._let_go(LEAVING)
        # A new storage may have the same address as an expired one. The version is part of the key,
        # because after an in-place write the same memory is a different piece.
        piece = self._by_key.get(key)
        if piece is None or piece.storage.expired():
            piece = self._send(key, tensor.detach())
        return _MovedTensor(piece, tensor)

    def _key(self, tensor: Tensor) -> _Key | None:
        """Return the key of the memory range to move for `tensor`, or None if it stays in place."""
        # A subclass may store its data elsewhere, and only memory of `device_type` can be
        # offloaded.
        if type(tensor) not in _PLAIN or tensor.device.type != self._device_type:
            return None
        if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
            return None
        # Parameters and buffers stay allocated anyway, so offloading them would save nothing.
        width, storage = tensor.element_size(), tensor.untyped_storage()
        nbytes = tensor.numel() * width
        if nbytes < LEAST or storage.data_ptr() in self._staying:
            return None
        span, first = int(storage.nbytes()), 0
        # Move the full storage, so that its other views share the piece. If this view is only a
        # small part of it, move just the range that the view covers.
        if span > _WASTE * nbytes:
            steps = zip(tensor.shape, tensor.stride(), strict=True)
            span = (1 + sum((size - 1) * stride for size, stride in steps)) * width
            first = int(tensor.storage_offset()) * width
        if not LEAST <= span <= _WASTE * nbytes:
            return None
        return storage._cdata, tensor._version, first, span

    def _send(self, key: _Key, source: Tensor) -> _Piece:
        _, _, first, nbytes = key
        data = torch.empty(0, dtype=torch.uint8, device=source.device)
        data.set_(source.untyped_storage(), first, (nbytes,), (1,))
        piece = _Piece(self._numbers, key, source, self._target.send(data))
        self._numbers += 1
        self._by_key[key] = self._by_number[piece.number] = piece
        self._leaving.append((ref(piece), nbytes))
        self._leaving_bytes += nbytes
        return piece

    def _let_go(self, limit: int) -> None:
        """Free the memory of completed copies. Wait while more than `limit` bytes are pending."""
        while self._leaving:
            piece = self._leaving[0][0]()
            too_many = self._leaving_bytes > limit
            if piece is not None and not too_many and not piece.offload.settled():
                return
            nbytes = self._leaving.popleft()[1]
            self._leaving_bytes -= nbytes
            if piece is not None:
                piece.settle()
                self._give_back(nbytes)

    def _give_back(self, nbytes: int) -> None:
        """Count freed memory. Occasionally return it to the system, because that takes time."""
        self._freed += nbytes
        if self._device_type == "cpu" and self._freed > LEAVING:
            self._freed = 0
            host_memory.trim()

    def end(self) -> None:
        """End a forward pass: free the memory of copies that have completed."""
        self._let_go(self._leaving_bytes)

    # -- backward -------------------------------------------------------------------------

    def unpack(self, held: Kept | _MovedTensor) -> Tensor:
        """Return the tensor that `held` replaced. Raises UsageError if it was changed in place."""
        if isinstance(held, Kept):
            return held.value()
        # The backward pass may start while the last pieces are still being copied, so limit their
        # memory, too.
        self._let_go(LEAVING)
        piece = held.piece
        if piece.source is not None:
            # The source has not been freed yet, so use it directly.
            data = torch.empty(0, dtype=torch.uint8, device=piece.source.device)
            data.set_(piece.source.untyped_storage(), piece.first, (piece.nbytes,), (1,))
            changed = piece.source._version != piece.version
        else:
            if not piece.is_back:
                self._fetch(piece)
            piece.was_used = True
            data, changed = piece.offload.arrived(), piece.was_changed
        if changed:
            raise _changed(held.dtype, held.shape)
        self._read_ahead(piece)
        return held.view(data)

    def _fetch(self, piece: _Piece) -> None:
        self._give_back(piece.nbytes)  # the backward pass has released this much memory
        piece.offload.fetch()
        piece.is_back = True
        self._back[piece.number] = ref(piece)

    def _read_ahead(self, current: _Piece) -> None:
        """Prefetch pieces saved before `current`, up to AHEAD bytes, and drop used pieces."""
        # Search by index, because the backward pass unpacks in roughly the reverse order of saving.
        # Fetch at least one piece, however large, so that the device never waits for a complete
        # fetch.
        total = self._make_room(current)
        waiting = any(not p.was_used for p in self._pieces_back())
        for number in range(current.number - 1, max(current.number - _SEARCH, 0) - 1, -1):
            piece = self._by_number.get(number)
            if piece is None or piece.is_back or piece.source is not None:
                continue
            total += piece.nbytes
            if total > AHEAD and waiting:
                return
            self._fetch(piece)
            waiting = True

    def _make_room(self, current: _Piece) -> int:
        """Drop the oldest used pieces until half of AHEAD is free. Return the bytes in use."""
        total = sum(piece.nbytes for piece in self._pieces_back())
        for piece in self._pieces_back():
            if total <= AHEAD // 2:
                break
            # A dropped piece can be fetched again if another node in the graph needs it.
            if piece.was_used and piece is not current:
                piece.offload.drop()
                piece.is_back = piece.was_used = False
                del self._back[piece.number]
                total -= piece.nbytes
        return total

    def _pieces_back(self) -> list[_Piece]:
        """Return the pieces that are fetched or being fetched, oldest first. Drop freed pieces."""
        alive = [(number, reference()) for number, reference in self._back.items()]
        for number, piece in alive:
            if piece is None:
                del self._back[number]
        return [piece for _, piece in alive if piece is not None]


_PLAIN = (Tensor, nn.Parameter)
"""Other subclasses of Tensor may have no storage, or several."""


def _changed(dtype: torch.dtype, shape: torch.Size) -> UsageError:
    return UsageError(
        f"A tensor of shape {tuple(shape)} ({dtype}) that backward needs was changed in place "
        "after forward had used it. Write x = x + 1 instead of x += 1."
    )
