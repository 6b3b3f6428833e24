"""The dtypes of torch by the names that safetensors has for them."""

from __future__ import annotations

import torch

from shardwise.errors import CheckpointError

_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.float32: "F32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float64: "F64",
    torch.complex64: "C64",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


def name_of(dtype: torch.dtype) -> str:
    """What safetensors calls `dtype`. Raises CheckpointError where it has no name for it."""
    if dtype not in _NAMES:
        raise CheckpointError(
            f"safetensors files hold no tensors of {dtype}. Keep such a tensor as another dtype, "
            "or as two of the real one."
        )
    return _NAMES[dtype]


def from_name(name: str) -> torch.dtype:
    """The dtype that safetensors calls `name`, a key of format.ITEM_BYTES."""
    return _DTYPES[name]
