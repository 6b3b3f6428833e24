"""Updates bf16 parameters without an fp32 master, by stochastic rounding.

A small update would be lost if its result were rounded to the nearest bf16 value. A stochastic
rounding goes up with the probability that is equal to the distance from the value below, so that
the result is correct on average (Gupta et al., Deep Learning with Limited Numerical Precision,
2015):

    fp32 bits   | 16 bits that are kept | 16 bits |
              +                         | noise   |    the carry rounds up

The noise is a hash of (seed, step, parameter, element), so it is the same in each placement and for
each number of ranks, and again after a resume. Elements of a parameter that `--tensor` or
`--expert` splits are counted in the full parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.layout.shards import Shard
from shardwise.states.storage.storage import Storage

_CHUNK = 2**17
"""Elements that are rounded at a time on a CPU, so that temporaries stay in its cache."""


class NoisePiece(NamedTuple):
    """Elements [first, end) of an interval: part of a parameter, from its element `offset` on."""

    first: int
    end: int
    key: int
    """Identifies the parameter: 32 bits."""
    offset: int
    shard: Shard | None = None
    """The part of the full parameter in which `offset` counts, or None if it is not split."""


class RoundedMaster(Storage):
    """The fp32 values of bf16 parameters, which exist only while a span is in use.

    `send` rounds an update stochastically. All other writes are rounded to the nearest value.

    Args:
        target: The parameters, in memory.
        pieces: The parts of parameters in the interval.
        seed: Returns 32 bits that differ in each step.
    """

    is_derived = True

    def __init__(
        self, target: Storage, pieces: Sequence[NoisePiece], seed: Callable[[], int]
    ) -> None:
        self.numel, self.dtype, self.device = target.numel, torch.float32, target.device
        self.spans = target.spans
        self._target = target
        self._pieces = pieces
        self._seed = seed
        self._in_use: dict[int, Tensor] = {}

    def read_ahead(self, index: int) -> None:
        """No-op: the parameters are already in memory."""

    def take(self, index: int, *, fresh: bool = False) -> Tensor:
        """Return the values of span `index` in fp32."""
        del fresh
        if index not in self._in_use:
            self._in_use[index] = self._target.take(index).float()
            self._target.put(index, changed=False)
        return self._in_use[index]

    @property
    def nbytes(self) -> int:
        """Always 0, because the values are those of the parameters."""
        return 0

    @property
    def memory_bytes(self) -> int:
        """Always 0 between steps."""
        return 0

    def put(self, index: int, *, changed: bool) -> None:
        """Drop the values of span `index`, which were rounded before if they were sent."""
        value = self._in_use.pop(index, None)
        if changed and value is not None:
            self._target.take(index).copy_(value)
            self._target.put(index, changed=True)

    def send(self, index: int, value: Tensor, into: Tensor) -> None:
        """Round `value`, span `index` after its update, stochastically to `into`."""
        del self._in_use[index]
        first, end = self.spans[index]
        into.copy_(value)  # the padding between parameters
        for piece in self._pieces:
            low, high = max(first, piece.first), min(end, piece.end)
            length = _CHUNK if self.device.type == "cpu" else max(1, high - low)
            for start in range(low, high, length):
                part = slice(start - first, min(start + length, high) - first)
                element = piece.offset + start - piece.first
                round_stochastically(
                    value[part], into[part], self._seed(), piece.key, element, piece.shard
                )


def round_stochastically(
    value: Tensor, into: Tensor, seed: int, key: int, element: int, shard: Shard | None = None
) -> None:
    """Round fp32 `value`, (n,), to bf16 `into`, (n,).

    Args:
        value: Elements [element, element + n) of a parameter, or of its part `shard`.
        into: Receives the rounded values.
        seed: 32 bits of the step.
        key: 32 bits of the parameter.
        element: Index of the first element.
        shard: The part of the full parameter that `element` counts in, or None.
    """
    if shard is None:
        noise = torch.arange(len(value), dtype=torch.int32, device=value.device)
        noise.add_(_signed(element))
    else:
        part = torch.arange(element, element + len(value), device=value.device)
        noise = shard.whole_indices(part).to(torch.int32)
    noise = _mix(_mix(noise.bitwise_xor_(_signed(key))) ^ _signed(seed))
    bits = value.view(torch.int32) + noise.bitwise_right_shift_(16).bitwise_and_(0xFFFF)
    rounded = bits.bitwise_and_(-0x10000).view(torch.float32)
    # The bits of a NaN could overflow. An infinity has no lower bits, so it stays as it is.
    into.copy_(torch.where(value.isnan(), value, rounded))


def _mix(bits: Tensor) -> Tensor:
    """Hash each int32 in place: the finalizer of MurmurHash3 (Appleby), which is a bijection."""
    bits ^= (bits >> 16) & 0xFFFF  # torch shifts in copies of the sign
    bits *= _signed(0x85EBCA6B)
    bits ^= (bits >> 13) & 0x7FFFF
    bits *= _signed(0xC2B2AE35)
    bits ^= (bits >> 16) & 0xFFFF
    return bits


def _signed(bits: int) -> int:
    """Return the int32 with the lower 32 bits of `bits`."""
    return (bits + 2**31) % 2**32 - 2**31
