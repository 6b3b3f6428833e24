"""Wire packs differences of parameters into few bytes for slow links, and unpacks them. Pure.

    fp32    the values as they are, fp64 ones in fp64: nothing is lost
    bf16    2 bytes a value
    int8    | scale of each block, fp32 | a code of 1 byte for each value |
    int4    | scale of each block, fp32 | two codes in a byte, the first in its low half |

A block is BLOCK neighbours; its scale is their largest magnitude over the largest code, so a value
comes back within half a scale (bf16: within 1/256 of itself). Who sends keeps what was lost, and
adds it to what is sent next (error feedback: Seide et al., 2014; Karimireddy et al., 2019).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from shardwise.config.outer_optimizer import LOSSLESS

BLOCK = 256
"""Values that share a scale."""

CODES = {"int8": 127, "int4": 7}
"""The largest code of the formats by block; codes go from minus that to that."""

_ALIGNMENT = 8
"""Bytes to which a packed message is rounded up, so that any format can be viewed in place."""


@dataclass(frozen=True)
class Wire:
    """One of the formats, for flat tensors of fp32 or fp64 values."""

    name: str = LOSSLESS

    @property
    def loses(self) -> bool:
        """Whether values come back rounded."""
        return self.name != LOSSLESS

    def nbytes(self, numel: int, dtype: torch.dtype) -> int:
        """Bytes of `numel` values of `dtype`, packed."""
        return -(-sum(self._lengths(numel, dtype)) // _ALIGNMENT) * _ALIGNMENT

    def _lengths(self, numel: int, dtype: torch.dtype) -> tuple[int, int]:
        """Bytes of the scales and of the codes."""
        if self.name not in CODES:
            return 0, numel * (2 if self.name == "bf16" else dtype.itemsize)
        scales = -(-numel // BLOCK) * 4
        return scales, numel if self.name == "int8" else -(-numel // 2)

    def holds(self, values: Tensor) -> bool:
        """Whether `values` are finite, and stay so when they are packed."""
        if self.name == "bf16":
            values = values.bfloat16()
        if self.name in CODES:
            values = (values / CODES[self.name]).float()
        return bool(torch.isfinite(values).all())

    def pack(self, values: Tensor) -> Tensor:
        """`values`, flat and finite, as (nbytes,) uint8 on the same device.

        Raises ValueError for a NaN or an infinity, and for what becomes one in this format.
        """
        if not bool(torch.isfinite(values).all()):
            raise ValueError("a NaN or an infinity")
        if not self.holds(values):
            raise ValueError(f"a value above what {self.name} can tell")
        packed = torch.zeros(
            self.nbytes(values.numel(), values.dtype), dtype=torch.uint8, device=values.device
        )
        first, second = self._lengths(values.numel(), values.dtype)
        if self.name in CODES:
            scales, codes = _coded(values, CODES[self.name])
            packed[:first] = scales.view(torch.uint8)
            packed[first : first + second] = codes if self.name == "int8" else _paired(codes)
        else:
            sent = values.bfloat16() if self.name == "bf16" else values
            packed[:second] = sent.contiguous().view(torch.uint8)
        return packed

    def unpack(self, packed: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        """The (numel,) values of `dtype` in `packed`, (nbytes,) uint8; in memory of their own."""
        first, second = self._lengths(numel, dtype)
        body = packed[first : first + second]
        if self.name not in CODES:
            kept = torch.bfloat16 if self.name == "bf16" else dtype
            return body.view(kept).to(dtype, copy=True)
        codes = body.view(torch.int8) if self.name == "int8" else _single(body, numel)
        scales = packed[:first].view(torch.float32).to(dtype)
        return (_blocks(codes.to(dtype)) * scales.unsqueeze(1)).view(-1)[:numel]


def _blocks(values: Tensor) -> Tensor:
    """(blocks, BLOCK), zeros after the last value."""
    return pad(values, (0, -values.numel() % BLOCK)).view(-1, BLOCK)


def _coded(values: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """The scales of the blocks, fp32, and the codes of the values, as uint8 of int8's bits."""
    blocks = _blocks(values)
    scales = (blocks.abs().amax(1) / most).float()
    # A block of zeros has the scale 0, and its codes are 0 whatever they are divided by.
    divisors = torch.where(scales > 0, scales, 1.0).to(values.dtype).unsqueeze(1)
    codes = (blocks / divisors).round_().clamp_(-most, most)
    return scales, codes.to(torch.int8).view(torch.uint8).view(-1)[: values.numel()]


def _paired(codes: Tensor) -> Tensor:
    """Codes of 4 bits, two in a byte."""
    even = pad(codes, (0, codes.numel() % 2)) & 0x0F
    return even[0::2] | (even[1::2] << 4)


def _single(pairs: Tensor, numel: int) -> Tensor:
    """The codes in pairs, with their signs."""
    codes = torch.stack([pairs & 0x0F, pairs >> 4], 1).view(-1)[:numel].view(torch.int8)
    return torch.where(codes > 7, codes - 16, codes)
