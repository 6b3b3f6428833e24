"""Stores optimizer state in 8 bits per element, in blocks with one scale each.

Dettmers et al. (8-bit Optimizers via Block-wise Quantization, 2022) describe the method. Each block
of 256 elements is divided by its largest magnitude, the scale. Each quotient is rounded to the
nearest of 256 values, the *dynamic map*, whose spacing grows with the magnitude:

    values   0   3e-7 ... 1e-6   ...   1e-2 ... 1e-1   0.1035 0.1105 ... 0.9965 1
                 2 values              32 values       128 values

Two details differ from the paper, so that states survive many updates and checkpoints:

- The map of signed values is symmetric. Rounding rounded values again therefore changes nothing,
  and a checkpoint, which stores fp32, restores the same codes.
- A positive value of an unsigned state is never rounded to 0. The update divides by the root of
  such a state, so with a 0 the step could be arbitrarily large.

Parameters start at multiples of the block (the grain of the layout). A parameter's blocks are
therefore the same in each placement and for each number of ranks, and no block contains elements of
two parameters. If `--tensor` or `--expert` splits a parameter, each part has its own blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.layout.bucket_layout import Span
from shardwise.states.storage.storage import Storage

BLOCK = 256
"""Number of elements with a common scale."""

SIGNED_KEYS = {
    "exp_avg": True,
    "momentum_buffer": True,
    "exp_avg_sq": False,
    "max_exp_avg_sq": False,
    "exp_inf": False,
    "square_avg": False,
}
"""Entries of optimizer state that can be stored in 8 bits -> whether values may be negative."""

_CHUNK = 2**17
"""Elements that are rounded at a time on a CPU, so that temporaries stay in its cache.

An accelerator rounds 8 times as many, because each call costs more there.
"""


def nbytes_of(numel: int, itemsize: int) -> int:
    """Return the size in bytes of `numel` quantised elements and their scales.

    `itemsize` is the size of a scale in bytes.
    """
    return numel + -(-numel // BLOCK) * itemsize


class QuantisedStorage(Storage):
    """Storage in memory, in 8 bits. A span is in full precision only while it is in use.

    Args:
        numel: Number of elements, a multiple of BLOCK.
        dtype: Dtype of the values and scales.
        device: Device of the memory.
        spans: The pieces that are used one at a time. Their lengths are multiples of BLOCK.
        signed: False if no value is ever negative.
    """

    def __init__(
        self,
        numel: int,
        dtype: torch.dtype,
        device: torch.device,
        spans: Sequence[Span],
        *,
        signed: bool,
    ) -> None:
        assert numel % BLOCK == 0
        self.numel, self.dtype, self.device, self.spans = numel, dtype, device, spans
        self.codes = torch.zeros(numel, dtype=torch.uint8, device=device)
        self.scales = torch.zeros(numel // BLOCK, dtype=dtype, device=device)
        self._signed = signed
        self._in_use: dict[int, Tensor] = {}

    def read_ahead(self, index: int) -> None:
        """No-op: the codes are already in memory."""

    def take(self, index: int, *, fresh: bool = False) -> Tensor:
        """Return the values of span `index`, or zeros if `fresh` is true."""
        if index not in self._in_use:
            first, end = self.spans[index]
            if fresh:
                # Zeros, not arbitrary content: the caller may leave a gap, and an infinity in it
                # would become the scale of a block.
                value = torch.zeros(end - first, dtype=self.dtype, device=self.device)
            else:
                value = _values(self._signed, self.dtype, self.device).index_select(
                    0, self.codes[first:end].int()
                )
                value.view(-1, BLOCK).mul_(self._scales_of(first, end).unsqueeze(1))
            self._in_use[index] = value
        return self._in_use[index]

    def put(self, index: int, *, changed: bool) -> None:
        """Drop the values of span `index`. If `changed` is true, round them to codes first."""
        value = self._in_use.pop(index)
        if not changed:
            return
        first, end = self.spans[index]
        length = _CHUNK if self.device.type == "cpu" else 8 * _CHUNK
        for low in range(0, end - first, length):
            high = min(low + length, end - first)
            self._round(value[low:high], first + low, first + high)

    def _round(self, value: Tensor, first: int, end: int) -> None:
        """Round `value` to codes, and store them as elements [first, end)."""
        blocks, scales = value.view(-1, BLOCK), self._scales_of(first, end)
        torch.amax(blocks.abs(), 1, out=scales)
        # A block of zeros has the scale 0. Divide it by 1.
        quotients = blocks / torch.where(scales == 0, 1, scales).unsqueeze(1)
        quotients = quotients.float().view(-1)
        rounding = _rounding(self._signed, self.device)
        # The upper half of a quotient's bits determines its code up to one border. A binary search
        # in the borders would take 20 times as long.
        codes = rounding.lowest.index_select(0, (quotients.view(torch.int32) >> 16) & 0xFFFF)
        codes += quotients > rounding.borders.index_select(0, codes)
        self.codes[first:end].copy_(codes)

    def _scales_of(self, first: int, end: int) -> Tensor:
        return self.scales[first // BLOCK : end // BLOCK]

    @property
    def nbytes(self) -> int:
        """Size of codes and scales in bytes."""
        return nbytes_of(self.numel, self.dtype.itemsize)

    @property
    def memory_bytes(self) -> int:
        """Size of codes and scales in bytes."""
        return self.nbytes


def dynamic_map(*, signed: bool) -> list[float]:
    """Return the values of the codes in ascending order: 255 values if `signed`, else 256.

    Each of the seven decades below 1 has twice as many values as the one below it.
    """
    positive = []
    for decade in range(7):
        count = 2 ** (decade if signed else decade + 1)
        width = 0.9 / count
        # Values are the centres of equal intervals of a decade.
        positive += [10.0 ** (decade - 6) * (0.1 + width * (n + 0.5)) for n in range(count)]
    if signed:
        # The paper adds 1 as one more positive value. Without -1, a block whose largest magnitude
        # is negative would shrink with each rounding.
        positive[-1] = 1.0
        return [*(-value for value in reversed(positive)), 0.0, *positive]
    return [0.0, *positive, 1.0]


class _Rounding(NamedTuple):
    """Tables that map an fp32 quotient to its code."""

    lowest: Tensor
    """Upper 16 bits of a quotient -> the smallest code of quotients with these bits: (65536,)."""
    borders: Tensor
    """Code -> the largest quotient that is rounded to it: (256,)."""


@cache
def _values(signed: bool, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(dynamic_map(signed=signed), dtype=torch.float32).to(device, dtype)


@cache
def _rounding(signed: bool, device: torch.device) -> _Rounding:
    values = _values(signed, torch.float32, torch.device("cpu")).double()
    borders = ((values[1:] + values[:-1]) / 2).float()
    if not signed:
        borders[0] = 0.0  # only 0 itself is rounded to 0
    # The range of quotients with the same upper bits is narrower than the distance of two borders.
    # Find the code of its lower end. For a negative quotient, its lower bits are ones.
    upper = torch.arange(2**16, dtype=torch.int64)
    bits = (upper << 16) | torch.where(upper >= 2**15, 0xFFFF, 0)
    lower_end = torch.where(bits >= 2**31, bits - 2**32, bits).to(torch.int32).view(torch.float32)
    lowest = torch.searchsorted(borders, lower_end).to(torch.int32)
    infinite = borders.new_full((256 - len(borders),), torch.inf)
    return _Rounding(lowest.to(device), torch.cat([borders, infinite]).to(device))
