"""Wire compresses parameter differences for slow links. Pure arithmetic.

    fp32    the values themselves, fp64 values as fp64: lossless
    bf16    2 bytes per value
    int8    | scale of each block, fp32 | a code of 1 byte for each value |
    int4    | scale of each block, fp32 | two codes per byte, the first in its low half |

A block is BLOCK consecutive values. Its scale is their largest magnitude divided by the largest
code, so each value is within half a scale of the original (bf16: within 1/256 of its magnitude).
The sender keeps the rounding error, and adds it to the next message (error feedback: Seide et al.,
2014; Karimireddy et al., 2019).
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
    """A wire format for flat tensors of fp32 or fp64 values."""

    name: str = LOSSLESS

    @property
    def loses(self) -> bool:
        """Whether the format rounds values."""
        return self.name != LOSSLESS

    def nbytes(self, numel: int, dtype: torch.dtype) -> int:
        """Return the number of bytes of `numel` packed values of `dtype`."""
        return packed_bytes(self.name, numel, dtype.itemsize)

    def holds(self, values: Tensor) -> bool:
        """Return whether `values` are finite, also after packing."""
        if self.name == "bf16":
            values = values.bfloat16()
        if self.name in CODES:
            values = (values / CODES[self.name]).float()
        return bool(torch.isfinite(values).all())

    def pack(self, values: Tensor) -> Tensor:
        """Pack flat, finite `values` into (nbytes,) uint8 on the same device.

        Raises ValueError for NaN, infinity, and values that overflow in this format.
        """
        if not bool(torch.isfinite(values).all()):
            raise ValueError("a NaN or an infinity")
        if not self.holds(values):
            raise ValueError(f"a value too large for {self.name}")
        # Zeros in the padding, so that every run sends the same bytes.
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
        """Unpack (nbytes,) uint8 into (numel,) values of `dtype`, in new memory."""
        first, second = packed_lengths(self.name, numel, dtype.itemsize)
        body = packed[first : first + second]
        if self.name not in CODES:
            stored_dtype = torch.bfloat16 if self.name == "bf16" else dtype
            # A copy, because callers change the result, and `packed` is the transport's buffer.
            return body.view(stored_dtype).to(dtype, copy=True)
        codes = body.view(torch.int8) if self.name == "int8" else _split_pairs(body, numel)
        scales = packed[:first].view(torch.float32).to(dtype)
        return (_blocks(codes.to(dtype)) * scales.unsqueeze(1)).view(-1)[:numel]


def _blocks(values: Tensor) -> Tensor:
    """Reshape to (blocks, BLOCK), padded with zeros."""
    return pad(values, (0, -values.numel() % BLOCK)).view(-1, BLOCK)


def _encode(values: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Return the scales of the blocks in fp32, and the codes as the uint8 bits of int8."""
    blocks = _blocks(values)
    scales = (blocks.abs().amax(1) / most).float()
    # A block of zeros has scale 0. Any divisor gives it the code 0.
    divisors = torch.where(scales > 0, scales, 1.0).to(values.dtype).unsqueeze(1)
    codes = (blocks / divisors).round_().clamp_(-most, most)
    return scales, codes.to(torch.int8).view(torch.uint8).view(-1)[: values.numel()]


def _pair_codes(codes: Tensor) -> Tensor:
    """Store two 4-bit codes in each byte."""
    # int8 codes in two's complement: the low 4 bits hold -8 to 7.
    even = pad(codes, (0, codes.numel() % 2)) & 0x0F
    return even[0::2] | (even[1::2] << 4)


def _split_pairs(pairs: Tensor, numel: int) -> Tensor:
    """Restore signed codes from bytes of two."""
    codes = torch.stack([pairs & 0x0F, pairs >> 4], 1).view(-1)[:numel].view(torch.int8)
    return torch.where(codes > 7, codes - 16, codes)
