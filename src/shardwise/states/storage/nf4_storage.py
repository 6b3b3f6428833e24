"""Stores frozen weights in 4 bits per element (NF4), in blocks of 64 with one scale each.

QLoRA (Dettmers et al., 2023) describes the format. Each block is divided by its largest magnitude,
the scale. Each quotient is rounded to the nearest of 16 values, which are quantiles of the normal
distribution. Two consecutive elements share a byte; the first one is in the upper half:

    elements   0.31 -0.50   0.02 ...      block of 64: 32 bytes and a scale
    codes      0xB2         0x7...

Two details differ from bitsandbytes, and make rounding repeatable:

- Scales have the dtype of the weights. The largest magnitude of a block is one of its weights, so
  the scale is exact, and rounding rounded weights again changes nothing. Checkpoints, which store
  the rounded weights in full, therefore restore the same values.
- Scales are not quantised a second time. For weights in bf16, the scales add 1/4 bit per weight;
  quantised scales add 1/8 bit.

Parameters start at multiples of the block (the grain of the layout). A weight's blocks are
therefore the same for each number of ranks, and no block contains elements of two weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

from shardwise.comm import Handle
from shardwise.states.storage.storage import Storage, spans_of

BLOCK = 64
"""Number of elements with a common scale."""

VALUES = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""The value of each code, in fp32 (QLoRA, appendix E)."""

_CHUNK = {"cpu": 2**17}
"""Device type -> elements that are converted at a time. On a CPU, temporaries stay in its cache."""

_LARGE_CHUNK = 2**24
"""The same on an accelerator, where launches cost more than memory. Temporaries take 0.2 GB."""


def nbytes_of(numel: int, itemsize: int) -> int:
    """Return the size in bytes of `numel` elements in NF4, in full blocks with their scales.

    `itemsize` is the size of a scale in bytes.
    """
    return -(-numel // BLOCK) * (BLOCK // 2 + itemsize)


class NF4Storage(Storage):
    """Storage in memory, in 4 bits. A span is in full precision only while it is in use.

    Args:
        numel: Number of elements, a multiple of BLOCK.
        dtype: Dtype of the values and scales.
        device: Device of the memory.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        assert numel % BLOCK == 0
        self.numel, self.dtype, self.device = numel, dtype, device
        self.spans = spans_of(numel)
        self.codes = torch.zeros(numel // 2, dtype=torch.uint8, device=device)
        self.scales = torch.zeros(numel // BLOCK, dtype=dtype, device=device)
        self._in_use: dict[int, Tensor] = {}

    def read_ahead(self, index: int) -> None:
        """No-op: the codes are already in memory."""

    def take(self, index: int, *, fresh: bool = False) -> Tensor:
        """Return the values of span `index`, or zeros if `fresh` is true."""
        if index not in self._in_use:
            first, end = self.spans[index]
            # Zeros, not arbitrary content: the caller may leave a gap, and an infinity in it would
            # become the scale of a block.
            value = torch.zeros(end - first, dtype=self.dtype, device=self.device)
            if not fresh:
                self._expand(first, value)
            self._in_use[index] = value
        return self._in_use[index]

    def put(self, index: int, *, changed: bool) -> None:
        """Drop the values of span `index`. If `changed` is true, round them to codes first."""
        value = self._in_use.pop(index)
        if changed:
            self._round(self.spans[index][0], value)

    def load(self, into: Tensor) -> None:
        """Write the values of the full interval to `into`, of shape (numel,)."""
        self._expand(0, into)

    def store(self, value: Tensor) -> None:
        """Round `value`, of shape (numel,), to codes and scales."""
        self._round(0, value)

    def _expand(self, first: int, into: Tensor) -> None:
        """Write the values of the elements that start at `first` to `into`."""
        end = first + into.numel()
        _expand(self.codes[first // 2 : end // 2], self.scales[first // BLOCK : end // BLOCK], into)

    def _round(self, first: int, value: Tensor) -> None:
        """Round `value`, and store it as the elements that start at `first`."""
        for low, high in _chunks(value):
            begin, end = first + low, first + high
            blocks = value[low:high].to(self.device).view(-1, BLOCK)
            scales = self.scales[begin // BLOCK : end // BLOCK]
            torch.amax(blocks.abs(), 1, out=scales)
            # A block of zeros has the scale 0. Divide it by 1.
            wide = torch.promote_types(self.dtype, torch.float32)
            quotients = blocks.to(wide) / torch.where(scales == 0, 1, scales).unsqueeze(1)
            codes = torch.bucketize(quotients.float(), _borders(self.device), out_int32=True)
            pairs = codes.view(-1, 2)
            self.codes[begin // 2 : end // 2].copy_(pairs[:, 0] * 16 + pairs[:, 1])

    @property
    def nbytes(self) -> int:
        """Size of codes and scales in bytes."""
        return nbytes_of(self.numel, self.dtype.itemsize)

    @property
    def memory_bytes(self) -> int:
        """Size of codes and scales in bytes."""
        return self.nbytes


def pack(storage: NF4Storage, cuts: Sequence[int], rank: int) -> tuple[Tensor, list[int]]:
    """Return a buffer for the bytes of a full bucket, with those of `rank` filled in, and its cuts.

    `cuts` are the ranks' intervals in elements. `storage` holds the interval of `rank`.
    """
    edges = [nbytes_of(cut, storage.dtype.itemsize) for cut in cuts]
    packed = torch.empty(edges[-1], dtype=torch.uint8, device=storage.device)
    own = packed[edges[rank] : edges[rank + 1]]
    torch.cat([storage.codes, storage.scales.view(torch.uint8)], out=own)
    return packed, edges


class ExpandingGather(Handle):
    """A gather of a bucket in 4 bits, which `wait` expands.

    Args:
        gather: The pending gather of `packed`.
        packed: The bytes of the full bucket (see `pack`).
        edges: The ranks' intervals of `packed`.
        cuts: The ranks' intervals of the bucket, in elements.
        into: Receives the values of the full bucket: (cuts[-1],).
    """

    def __init__(
        self,
        gather: Handle,
        packed: Tensor,
        edges: Sequence[int],
        cuts: Sequence[int],
        into: Tensor,
    ) -> None:
        self._gather = gather

        def expand() -> None:
            gather.wait()
            for (low, high), (first, end) in zip(pairwise(cuts), pairwise(edges), strict=True):
                border = first + (high - low) // 2  # codes, then scales
                scales = packed[border:end].view(into.dtype)
                _expand(packed[first:border], scales, into[low:high])

        super().__init__(expand, gather.advance)

    def reusable(self) -> None:
        self.wait()
        self._gather.reusable()


def _expand(codes: Tensor, scales: Tensor, into: Tensor) -> None:
    """Write the values of `codes`, (n / 2,), and `scales`, (n / BLOCK,), to `into`, (n,)."""
    wide = torch.promote_types(scales.dtype, torch.float32)
    pairs = _pairs(wide, into.device)
    for low, high in _chunks(into):
        value = torch.view_as_real(pairs.index_select(0, codes[low // 2 : high // 2].int()))
        # Multiply in at least fp32, so that 16-bit weights are rounded only once.
        value = value.view(-1, BLOCK) * scales[low // BLOCK : high // BLOCK].to(wide).unsqueeze(1)
        into[low:high].copy_(value.view(-1))


def _chunks(value: Tensor) -> list[tuple[int, int]]:
    numel, length = value.numel(), _CHUNK.get(value.device.type, _LARGE_CHUNK)
    return [(low, min(low + length, numel)) for low in range(0, numel, length)]


@cache
def _pairs(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the two values that each byte encodes, as a complex number: (256,).

    A lookup copies both at once, which takes a third of the time on a CPU.
    """
    values = torch.tensor(VALUES, dtype=torch.float32).to(device, dtype)
    byte = torch.arange(256, device=device)
    return torch.complex(values[byte // 16], values[byte % 16])


@cache
def _borders(device: torch.device) -> Tensor:
    """Return the midpoints between neighbouring values: (15,)."""
    values = torch.tensor(VALUES, dtype=torch.float64)
    return ((values[1:] + values[:-1]) / 2).float().to(device)
