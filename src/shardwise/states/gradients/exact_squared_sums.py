"""Computes exact sums of squares for the gradient norm of the exact mode.

The bits of an exact sum depend on the elements alone, wherever buckets and intervals begin. Each
grain of elements, which no interval cuts, is squared and summed by halves:

    s = x * x    (64)  ─▶  s[:32] + s[32:]  ─▶  ...  ─▶  one number

Such a number is a whole multiple of a power of two. Whole numbers are added exactly in any order,
so they are counted by exponent, in one row that adds up over buckets and ranks, and rounded once
at the end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise.states.storage.squared_sums import as_real
from shardwise.states.storage.storage import Span, Storage

GRAIN = 64
"""Elements that are summed as one; also what the widest of the CPU's vector loops take at a time
(two registers of 64 bytes, of 16-bit numbers), so that no element falls into the loop's scalar
rest, whose rounding differs."""

EXACT_CHUNK = 1 << 17
"""Elements that an exact sum reads at a time, while they are in the processor's cache."""

_LOWEST = -1073
"""The smallest exponent that frexp gives for an fp64 number."""

_BINS = 1024 - _LOWEST + 1

_DIGITS = 53
"""Bits of an fp64 number's whole part; in two halves, so that sums of 2**26 of them stay below
2**53 and travel as fp64."""

_HALF = 27


def exact_row(storage: Storage, own: Span, *, wide: bool = False) -> Tensor:
    """Count the squares of the elements `own` of `storage` by exponent: int64, (2 x bins + 1,).

    Rows of buckets and ranks add up; the last number counts grains that are not finite. With
    `wide`, squares are fp64, for fp32 numbers whose squares overflow.
    """
    # What rests on the host for an accelerator is read there.
    device = torch.device("cpu") if storage.copy_stream is not None else storage.device
    row = torch.zeros(2 * _BINS + 1, dtype=torch.int64, device=device)
    for index, (first, end) in enumerate(storage.spans):
        value = storage.take(index)
        low, high = max(first, own[0]), min(end, own[1])
        for chunk in torch.split(value[low - first : max(high - first, 0)], EXACT_CHUNK):
            _count(chunk, row, wide=wide)
        storage.put(index, changed=False)
    return row


def _count(values: Tensor, row: Tensor, *, wide: bool) -> None:
    if not values.numel():
        return
    sums = _by_grain(values, wide=wide).double()
    finite = torch.isfinite(sums)
    row[-1] += (~finite).sum()
    fraction, exponent = torch.frexp(torch.where(finite, sums, 0.0))
    whole = (fraction * 2.0**_DIGITS).long()
    bins = exponent.long() - _LOWEST
    row[:_BINS].index_add_(0, bins, whole >> _HALF)
    row[_BINS:-1].index_add_(0, bins, whole & ((1 << _HALF) - 1))


def _by_grain(values: Tensor, *, wide: bool) -> Tensor:
    """The sum of squares of each grain."""
    values = as_real(values)
    if wide:
        values = values.double()
    values = values.view(-1, GRAIN)
    values = values * values
    while values.shape[1] > 1:
        half = values.shape[1] // 2
        values = values[:, :half] + values[:, half:]
    return values.view(-1)


def exact_total(rows: Sequence[Sequence[float]]) -> float:
    """The sum of squares that the exact rows of all ranks add up to; NaN for one not finite."""
    whole = 0
    for row in rows:
        if row[-1]:
            return math.nan
        for place, count in enumerate(row):
            if count:
                whole += int(count) << (place + _HALF if place < _BINS else place - _BINS)
    try:
        return whole / (1 << (_DIGITS - _LOWEST))
    except OverflowError:
        return math.inf
