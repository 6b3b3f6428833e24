"""Computes a state's sum of squares, in fp64 or exactly, for the global gradient norm."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from shardwise.layout.bucket_layout import Span
from shardwise.model.precision import NARROW

CHUNK = 1 << 18
"""Number of elements whose squares are added in the tensor's own precision."""

GRAIN = 64
"""Number of elements that an exact sum adds as a group. The CPU's widest vector loops process this
many at a time (two registers of 64 bytes with 16-bit numbers), so no element is left for a loop's
scalar tail, which rounds differently."""

EXACT_CHUNK = 1 << 17
"""Number of elements that an exact sum reads at a time, so that they stay in the CPU's cache."""

_LOWEST = -1073
"""The smallest exponent that frexp returns for an fp64 number."""

_BINS = 1024 - _LOWEST + 1

_DIGITS = 53
"""Bits in the significand of an fp64 number. It is counted in two halves, so that sums of 2**26
halves stay below 2**53 and can be sent as fp64 without rounding."""

_HALF = 27


class Squared(Protocol):
    """The attributes and methods of a storage that are needed to compute sums of squares."""

    @property
    def memory(self) -> Tensor | None:
        """The full interval if it is always in memory, else None."""

    @property
    def copy_stream(self) -> object | None:
        """Runs copies between host memory and the accelerator. None if no copies are needed."""

    @property
    def device(self) -> torch.device:
        """Device of a span while it is in use."""

    def read_spans(self) -> Iterator[tuple[int, Tensor]]:
        """Yield pairs (first element, span). A span is valid until the next one is requested."""


def square_span(storage: Squared, own: Span, *, wide: bool = False) -> Tensor:
    """Return the sum of squares of the elements `own` of `storage`, as an fp64 scalar.

    Squares are computed in fp64 if `wide` is true, or if the storage is not entirely in the
    device's memory.
    """
    if storage.memory is not None and storage.copy_stream is None and not wide:
        return squared_sum(storage.memory[own[0] : own[1]])
    total = torch.zeros((), dtype=torch.float64)
    for first, value in storage.read_spans():
        # The part of this span inside `own`.
        low, high = max(first, own[0]), min(first + value.numel(), own[1])
        if low < high:
            part = value[low - first : high - first]
            total += squared_sum(part.to(torch.promote_types(part.dtype, torch.float64))).cpu()
    return total


def squared_sum(values: Tensor) -> Tensor:
    """Return the sum of squares of a flat tensor, as an fp64 scalar on its device.

    Within short chunks, squares are added in the tensor's precision (at least fp32), which is
    accurate enough. The chunks' sums are added in fp64. On an accelerator this takes a fixed number
    of kernels and no copy to the host.
    """
    values = as_real(values)
    if not values.numel():
        return torch.zeros((), dtype=torch.float64, device=values.device)
    if values.numel() <= CHUNK:
        return torch.dot(values, values).double()
    if values.device.type == "cpu":
        chunks = torch.split(values, CHUNK)
        return torch.stack([torch.dot(chunk, chunk) for chunk in chunks]).double().sum()
    # Use a single reduction for all chunks, because every kernel launch costs time.
    whole = values.numel() // CHUNK * CHUNK
    norms = torch.linalg.vector_norm(values[:whole].view(-1, CHUNK), dim=1)
    rest = torch.linalg.vector_norm(values[whole:])
    return torch.cat([norms, rest.view(1)]).double().square().sum()


def as_real(values: Tensor) -> Tensor:
    """Return `values` as real numbers of at least 32 bits."""
    if values.is_complex():
        values = torch.view_as_real(values).view(-1)
    return values.float() if values.dtype in NARROW else values


def exact_row(storage: Squared, own: Span, *, wide: bool = False, grain: int = GRAIN) -> Tensor:
    """Sum the squares of the elements `own` of `storage` exactly.

    Returns int64 bins of shape (2 x bins + 1,): two bins per exponent, and a last one that counts
    the grains (groups of 64 elements) that are not finite. Such rows can be added across buckets
    and ranks. If `wide` is true, squares are computed in fp64, for fp32 numbers whose squares
    overflow. A `grain` of fewer elements, a power of two, is for tensors that may be divided inside
    a group of 64.

        s = x * x    (64)  ─▶  s[:32] + s[32:]  ─▶  ...  ─▶  one number per grain

    The result depends only on the elements, not on the boundaries of buckets and intervals: no
    interval splits a grain, and each grain's number is an integer multiple of a power of two.
    Integers can be added exactly in any order. Numbers are therefore summed separately for each
    exponent, and rounded once, in `exact_total`.
    """
    # A rank with an accelerator reads storage in host memory on the host.
    device = torch.device("cpu") if storage.copy_stream is not None else storage.device
    row = torch.zeros(2 * _BINS + 1, dtype=torch.int64, device=device)
    for first, value in storage.read_spans():
        low, high = max(first, own[0]), min(first + value.numel(), own[1])
        for chunk in torch.split(value[low - first : max(high - first, 0)], EXACT_CHUNK):
            if chunk.numel():
                _count(chunk, row, grain, wide=wide)
    return row


def _count(values: Tensor, row: Tensor, grain: int, *, wide: bool) -> None:
    values = as_real(values).double() if wide else as_real(values)
    squares = values.view(-1, grain)
    squares = squares * squares
    # Add halves in a fixed order. `sum` could choose a different order on a different CPU.
    while squares.shape[1] > 1:
        half = squares.shape[1] // 2
        squares = squares[:, :half] + squares[:, half:]
    sums = squares.view(-1).double()
    finite = torch.isfinite(sums)
    row[-1] += (~finite).sum()
    fraction, exponent = torch.frexp(torch.where(finite, sums, 0.0))
    # Split the 53-bit significand into two halves, so that sums of 2**26 halves stay exact in fp64.
    whole = (fraction * 2.0**_DIGITS).long()
    bins = exponent.long() - _LOWEST
    row[:_BINS].index_add_(0, bins, whole >> _HALF)
    row[_BINS:-1].index_add_(0, bins, whole & ((1 << _HALF) - 1))


def exact_total(rows: Sequence[Sequence[float]]) -> float:
    """Return the total of all ranks' exact rows, rounded once. NaN if any square is not finite."""
    whole = 0  # a Python integer of any length, so nothing is rounded before the division
    for row in rows:
        if row[-1]:
            return math.nan
        for place, count in enumerate(row):
            if count:
                whole += int(count) << (place + _HALF if place < _BINS else place - _BINS)
    try:
        return whole / (1 << (_DIGITS - _LOWEST))
    except OverflowError:  # larger than any fp64 number
        return math.inf
