"""Offloads what autograd saves for backward, beside forward, and fetches it ahead of backward.

`pack` and `unpack` are for torch.autograd.graph.saved_tensors_hooks. What is moved is memory, not
tensors: views of one storage (query, key and value) travel once. Backward goes through what was
saved from its end, so that when a piece is asked for, those saved before it are on their way.

A piece is the value at the moment it was saved. Where the tensor is changed in place before that
value is safe, and backward asks for it, that is an error, as it is in torch.
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
"""Bytes below which a tensor stays where it is."""

LEAVING = 64 * 2**20
"""Bytes on their way out, above which forward waits for the oldest."""

AHEAD = 64 * 2**20
"""Bytes fetched ahead of need, and kept when they may be needed again. One piece may be larger."""

_WASTE = 8
"""A view's whole storage is moved when it is at most so many times the view's bytes."""

_SEARCH = 64
"""How many numbers back the next piece to fetch is looked for."""

_Key = tuple[int, int, int, int]
"""Storage, version, first byte and number of bytes."""


class Kept:
    """A tensor that stays, with the version that it must still have in backward."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.version = tensor._version

    def value(self) -> Tensor:
        if self.tensor._version != self.version:
            raise _changed(self.tensor.dtype, self.tensor.shape)
        return self.tensor


class _Piece:
    """A range of a storage: it leaves, is away, or is back. Freed when nothing saved needs it."""

    def __init__(self, number: int, key: _Key, source: Tensor, offload: Offload) -> None:
        self.number = number
        # Holds the address, so that no new storage has it: keys of pieces are addresses.
        self.storage = _StorageWeakRef(source.untyped_storage())
        self.version, self.first, self.nbytes = key[1:]
        self.source: Tensor | None = source
        """Keeps the memory until the offload has settled."""
        self.offload = offload
        self.is_back = self.was_used = self.was_changed = False

    def settle(self) -> None:
        """Let go of the source, whose value is safe elsewhere. From the thread of forward or of
        backward only: in another one, a change in place could be under way unseen."""
        if self.source is None:
            return
        self.offload.settle()
        self.was_changed = self.source._version != self.version
        self.source = None


class _Moved:
    """A saved tensor that is a view of a piece."""

    __slots__ = ("dtype", "offset", "piece", "shape", "stride")

    def __init__(self, piece: _Piece, tensor: Tensor) -> None:
        self.piece = piece
        self.dtype = tensor.dtype
        self.shape, self.stride = tensor.shape, tensor.stride()
        # In elements, from the piece's first byte.
        self.offset = tensor.storage_offset() - piece.first // tensor.element_size()

    def view(self, data: Tensor) -> Tensor:
        """The tensor in the piece's memory, `data`."""
        start = data.storage_offset() // self.dtype.itemsize + self.offset
        empty = torch.empty(0, dtype=self.dtype, device=data.device)
        return empty.set_(data.untyped_storage(), start, self.shape, self.stride)


class SavedTensors:
    """Offloads what is saved for backward to `target`; `pack` and `unpack` are the pair of hooks.

    Only memory on devices of `device_type` moves, in tensors of at least LEAST bytes that do not
    lie in the memory of the models.
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
        """A forward begins: the memory of these models' parameters and buffers stays."""
        held = (t for model in models for t in (*model.parameters(), *model.buffers()))
        self._staying = {t.untyped_storage().data_ptr() for t in held if type(t) in _PLAIN}

    # -- forward --------------------------------------------------------------------------

    def pack(self, tensor: Tensor) -> Kept | _Moved:
        """What autograd keeps in the place of `tensor`."""
        if (key := self._key(tensor)) is None:
            return Kept(tensor)
        self._let_go(LEAVING)
        # An expired storage may have given its address to a new one.
        piece = self._by_key.get(key)
        if piece is None or piece.storage.expired():
            piece = self._send(key, tensor.detach())
        return _Moved(piece, tensor)

    def _key(self, tensor: Tensor) -> _Key | None:
        """The memory that must move for `tensor` to move, or None when it stays."""
        if type(tensor) not in _PLAIN or tensor.device.type != self._device_type:
            return None
        if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
            return None
        # Parameters and buffers stay anyway: offloading them would save nothing.
        width, storage = tensor.element_size(), tensor.untyped_storage()
        nbytes = tensor.numel() * width
        if nbytes < LEAST or storage.data_ptr() in self._staying:
            return None
        span, first = int(storage.nbytes()), 0
        # The whole storage, so that other views of it share the piece, unless this view is a small
        # part: then only the range that it covers.
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
        """Free the memory of what has left; wait for it while more than `limit` bytes leave."""
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
        """Count freed memory; return it to the system now and then, since doing so costs time."""
        self._freed += nbytes
        if self._device_type == "cpu" and self._freed > LEAVING:
            self._freed = 0
            host_memory.trim()

    def end(self) -> None:
        """A forward has ended: free what has left by now."""
        self._let_go(self._leaving_bytes)

    # -- backward -------------------------------------------------------------------------

    def unpack(self, held: Kept | _Moved) -> Tensor:
        """The tensor that `held` stands for. Raises UsageError when it was changed in place."""
        if isinstance(held, Kept):
            return held.value()
        # Backward may begin while the last pieces are still leaving: bound their memory here too.
        self._let_go(LEAVING)
        piece = held.piece
        if piece.source is not None:
            # It has not been freed yet: the range of the memory that the user's tensor still holds.
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
        self._give_back(piece.nbytes)  # what backward has done with
        piece.offload.fetch()
        piece.is_back = True
        self._back[piece.number] = ref(piece)

    def _read_ahead(self, current: _Piece) -> None:
        """Fetch what was saved before `current`, as far as it fits; drop what had its use."""
        # By number, because backward unpacks in roughly the reverse order of saving. At least one
        # piece is fetched, however large it is, so that the device never waits for a whole fetch.
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
        """Drop the oldest pieces that were used until half of AHEAD is free; the bytes left."""
        total = sum(piece.nbytes for piece in self._pieces_back())
        for piece in self._pieces_back():
            if total <= AHEAD // 2:
                break
            if piece.was_used and piece is not current:
                piece.offload.drop()
                piece.is_back = piece.was_used = False
                del self._back[piece.number]
                total -= piece.nbytes
        return total

    def _pieces_back(self) -> list[_Piece]:
        """The pieces that are back or on their way, oldest first; those that died are forgotten."""
        alive = [(number, reference()) for number, reference in self._back.items()]
        for number, piece in alive:
            if piece is None:
                del self._back[number]
        return [piece for _, piece in alive if piece is not None]


_PLAIN = (Tensor, nn.Parameter)
"""Subclasses may hold no memory of their own, or several."""


def _changed(dtype: torch.dtype, shape: torch.Size) -> UsageError:
    return UsageError(
        f"A tensor of shape {tuple(shape)} ({dtype}) that backward needs was changed in place "
        "after forward had used it. Write the change out of place, as in x = x + 1 for x += 1."
    )
