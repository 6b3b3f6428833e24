"""Tensors of the device in host memory, made with DLPack, and the host's views of them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor

from tests.phantom.order import Span
from tests.phantom.streams import Device

_CUDA = 2
_CODES = {
    torch.float16: 2,
    torch.float32: 2,
    torch.float64: 2,
    torch.bfloat16: 4,
    torch.int8: 0,
    torch.int16: 0,
    torch.int32: 0,
    torch.int64: 0,
    torch.uint8: 1,
    torch.bool: 6,
    torch.complex64: 5,
    torch.complex128: 5,
}
"""DLPack's type code of a dtype."""


class _Managed(ctypes.Structure):
    """DLManagedTensor."""


_Managed._fields_ = [
    ("data", ctypes.c_void_p),
    ("device_type", ctypes.c_int32),
    ("device_id", ctypes.c_int32),
    ("ndim", ctypes.c_int32),
    ("code", ctypes.c_uint8),
    ("bits", ctypes.c_uint8),
    ("lanes", ctypes.c_uint16),
    ("shape", ctypes.POINTER(ctypes.c_int64)),
    ("strides", ctypes.POINTER(ctypes.c_int64)),
    ("byte_offset", ctypes.c_uint64),
    ("context", ctypes.c_void_p),
    ("deleter", ctypes.c_void_p),
]

_capsule: Any = ctypes.PyDLL(None).PyCapsule_New
_capsule.restype = ctypes.py_object
_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


class Blocks:
    """The memory of all tensors of the device, by the address of its first byte."""

    host: ClassVar[dict[int, Tensor]] = {}
    _alive: ClassVar[dict[int, tuple[Any, ...]]] = {}


_NOTHING = torch.zeros(64, dtype=torch.uint8)
"""Address of tensors without elements."""


def is_on_device(value: Any) -> bool:
    """Return whether a tensor is on the device."""
    return isinstance(value, Tensor) and value.device.type == "cuda"


def to_device(host: Tensor) -> Tensor:
    """Return a tensor of the device in the memory of `host`, which no other code uses."""
    address = host.data_ptr()
    dims = ctypes.c_int64 * max(host.dim(), 1)
    shape, strides = dims(*host.shape), dims(*host.stride())
    managed = _Managed(
        data=address or _NOTHING.data_ptr(),
        device_type=_CUDA,
        ndim=host.dim(),
        code=_CODES[host.dtype],
        bits=8 * host.dtype.itemsize,
        lanes=1,
        shape=shape,
        strides=strides,
        deleter=ctypes.cast(Device.library.release, ctypes.c_void_p),
    )
    Blocks._alive[ctypes.addressof(managed)] = (managed, address, shape, strides)
    if address:
        Blocks.host[address] = host
        Device.order.allocated(address, host.untyped_storage().nbytes(), Device.current())
    return torch._C._from_dlpack(_capsule(ctypes.addressof(managed), b"dltensor", None))  # type: ignore[attr-defined]


def released() -> Iterator[int]:
    """Return the addresses of blocks that were freed since the last call."""
    while number := Device.library.next_released():
        if number not in Blocks._alive:
            yield number  # pinned memory
            continue
        _, address, _, _ = Blocks._alive.pop(number)
        if address:
            del Blocks.host[address]
            yield address


def to_host(tensor: Tensor) -> Tensor:
    """Return the host's view of a tensor of the device."""
    address = tensor.untyped_storage().data_ptr()
    block = Blocks.host.get(address)
    if block is None:
        assert tensor.numel() == 0, f"no block of the device at {address}"
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    storage = block.untyped_storage()
    offset = (address - storage.data_ptr()) // tensor.element_size() + tensor.storage_offset()
    view = torch.empty(0, dtype=tensor.dtype)
    view.set_(storage, offset, tensor.shape, tensor.stride())  # type: ignore[call-overload]
    return view.conj() if tensor.is_conj() else view


def span(tensor: Tensor) -> Span:
    """Return the bytes from the first to the last, with the gaps between rows of a view."""
    first = tensor.data_ptr()
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    nbytes = (last + 1) * tensor.element_size() if tensor.numel() else 0
    return Span(tensor.untyped_storage().data_ptr(), first, first + nbytes)
