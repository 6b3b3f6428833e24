"""Compresses the values that islands send over slow links. Does not communicate.

    fp32    the values themselves (fp64 values are sent as fp64): lossless
    bf16    2 bytes per value
    int8    | scale of each block, fp32 | one code of 1 byte per value |
    int4    | scale of each block, fp32 | two codes per byte, the first in the low half |

A block consists of BLOCK consecutive values. Its scale is their largest magnitude divided by the
largest code, so each decoded value differs from the original by at most half a scale (in bf16, by
at most 1/256 of its magnitude). The sender stores the rounding error and adds it to the next
message (error feedback: Seide et al., 2014; Karimireddy et al., 2019).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from shardwise.config.outer_optimizer import BLOCK, LOSSLESS, packed_bytes, packed_lengths

CODES = {"int8": 127, "int4": 7}
"""The largest code of each block format. Codes are in [-largest, largest]."""


@dataclass(frozen=True)
class Wire:
    """A wire format that packs and unpacks flat tensors of fp32 or fp64 values."""

    name: str = LOSSLESS

    @property
    def loses(self) -> bool:
        """True if the format rounds values."""
        return self.name != LOSSLESS

    def nbytes(self, numel: int, dtype: torch.dtype) -> int:
        """Return the packed size in bytes of `numel` values of dtype `dtype`."""
        return packed_bytes(self.name, numel, dtype.itemsize)

    def holds(self, values: Tensor) -> bool:
        """Return whether `values` are finite and remain finite when packed."""
        if self.name == "bf16":
            values = values.bfloat16()
        if self.name in CODES:
            values = (values / CODES[self.name]).float()
        return bool(torch.isfinite(values).all())

    def pack(self, values: Tensor) -> Tensor:
        """Pack flat, finite `values` into (nbytes,) uint8 on the same device.

        Raises ValueError if a value is NaN, infinite or too large for this format.
        """
        if not bool(torch.isfinite(values).all()):
            raise ValueError("a NaN or an infinity")
        if not self.holds(values):
            raise ValueError(f"a value too large for {self.name}")
        # Fill the padding with zeros, so that every run sends the same bytes.
        packed = torch.zeros(
            self.nbytes(values.numel(), values.dtype), dtype=torch.uint8, device=values.device
        )
        first, second = packed_lengths(self.name, values.numel(), values.dtype.itemsize)
        if self.name in CODES:
            scales, codes = _encode(values, CODES[self.name])
            packed[:first] = scales.view(torch.uint8)
            packed[first : first + second] = codes if self.name == "int8" else _pair_codes(codes)
        else:
            encoded = values.bfloat16() if self.name == "bf16" else values
            packed[:second] = encoded.contiguous().view(torch.uint8)
        return packed

    def unpack(self, packed: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        """Unpack (nbytes,) uint8 into a new tensor of shape (numel,) and dtype `dtype`."""
        first, second = packed_lengths(self.name, numel, dtype.itemsize)
        body = packed[first : first + second]
        if self.name not in CODES:
            stored_dtype = torch.bfloat16 if self.name == "bf16" else dtype
            # Copy, because callers modify the result, and `packed` is the transport's buffer.
            return body.view(stored_dtype).to(dtype, copy=True)
        codes = body.view(torch.int8) if self.name == "int8" else _split_pairs(body, numel)
        scales = packed[:first].view(torch.float32).to(dtype)
        return (_blocks(codes.to(dtype)) * scales.unsqueeze(1)).view(-1)[:numel]


def _blocks(values: Tensor) -> Tensor:
    """Reshape `values` to (blocks, BLOCK), padded with zeros."""
    return pad(values, (0, -values.numel() % BLOCK)).view(-1, BLOCK)


def _encode(values: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Return the blocks' scales, (blocks,) fp32, and the int8 codes viewed as uint8, (numel,)."""
    blocks = _blocks(values)
    scales = (blocks.abs().amax(1) / most).float()
    # An all-zero block has scale 0. With any other divisor its codes are 0.
    divisors = torch.where(scales > 0, scales, 1.0).to(values.dtype).unsqueeze(1)
    codes = (blocks / divisors).round_().clamp_(-most, most)
    return scales, codes.to(torch.int8).view(torch.uint8).view(-1)[: values.numel()]


def _pair_codes(codes: Tensor) -> Tensor:
    """Pack pairs of 4-bit codes into bytes."""
    # Codes are int8 in two's complement, so the low 4 bits represent -8 to 7.
    even = pad(codes, (0, codes.numel() % 2)) & 0x0F
    return even[0::2] | (even[1::2] << 4)


def _split_pairs(pairs: Tensor, numel: int) -> Tensor:
    """Unpack `numel` signed codes from bytes that hold two 4-bit codes each."""
    codes = torch.stack([pairs & 0x0F, pairs >> 4], 1).view(-1)[:numel].view(torch.int8)
    return torch.where(codes > 7, codes - 16, codes)
