"""The order of the samples, and its cut into steps, shares and micro-batches. Pure arithmetic.

    epoch        3 1 4 0 5 9 2 6 8 7 10          a function of (seed, epoch, length) alone
    steps        3 1 4 0 5 9 | 2 6 8 7 10        total batches of 6; the last may be short
    shares       3 1 4 , 0 5 9 | 2 6 , 8 7 10    contiguous, one per rank
    micro-batch  3 1 ; 4 , 0 5 ; 9 | ...         of 2 rows; the same number on every rank

Only the cut into shares depends on the number of ranks, so a run at any world size sees the same
steps. The position in the data is one integer: the samples consumed since training began.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor

from shardwise.layout.bucket_layout import even_cuts
from shardwise.world.randomness import seed_from

T = TypeVar("T")

Rows = tuple[int, int]
"""Rows [first, end) of a total batch, or of an epoch."""


def epoch_order(seed: int, epoch: int, length: int, *, shuffle: bool) -> Tensor | range:
    """Return the dataset indices of `epoch` in total order: a (length,) int64 tensor if shuffled.

    Draws from no global generator.
    """
    if not shuffle:
        return range(length)
    # A separate generator: the order must not depend on what the script has drawn before.
    generator = torch.Generator().manual_seed(seed_from(seed, "order", epoch))
    return torch.randperm(length, generator=generator)


def indices(order: Tensor | range, rows: Rows) -> Sequence[int]:
    """Return the dataset indices of `rows` of an epoch."""
    part = order[rows[0] : rows[1]]
    return part if isinstance(part, range) else part.tolist()


def steps_per_epoch(length: int, batch_size: int, *, drop_last: bool) -> int:
    """Return the number of total batches in `length` samples. A short last one counts unless
    `drop_last`."""
    return length // batch_size if drop_last else -(-length // batch_size)


def used_length(length: int, batch_size: int, *, drop_last: bool) -> int:
    """Return how many of `length` samples an epoch uses."""
    return length // batch_size * batch_size if drop_last else length


def steps(length: int, batch_size: int, offset: int = 0) -> Iterator[Rows]:
    """Yield the total batches from sample `offset` on, as rows of the epoch."""
    for first in range(offset, length, batch_size):
        yield first, min(first + batch_size, length)


def share(rows: int, size: int, rank: int) -> Rows:
    """Return the contiguous rows of a total batch for `rank`. Shares differ by at most one row."""
    cuts = even_cuts(rows, size)
    return cuts[rank], cuts[rank + 1]


def largest_share(rows: int, size: int) -> int:
    """Return the number of rows in the largest share."""
    return -(-rows // size)


def micro_batches(rows: int, size: int, micro_batch_size: int | None) -> int:
    """Return the number of micro-batches in a total batch of `rows`: at least 1, and the same on
    all ranks."""
    # From the largest share, so that ranks with a row less have as many: each micro-batch is a
    # backward in which all ranks reduce.
    largest = largest_share(rows, size)
    return max(1, -(-largest // (micro_batch_size or max(1, largest))))


def micro_cuts(rows: Rows, micro_batch_size: int | None, count: int) -> list[Rows]:
    """Cut `rows` into `count` micro-batches of `micro_batch_size`; the last may be short.

    If that would leave the last ones empty, spread the rows evenly instead. With fewer rows than
    micro-batches the last ones are empty.
    """
    first, end = rows
    width = micro_batch_size or end - first
    if width * (count - 1) < end - first:
        bounds = [min(first + width * number, end) for number in range(count + 1)]
    else:
        each, more = divmod(end - first, count)
        bounds = [first + each * number + min(number, more) for number in range(count + 1)]
    return list(pairwise(bounds))


def parts(rows: int, size: int, rank: int, micro_batch_size: int | None) -> list[Rows]:
    """Return the micro-batches of `rank` in a total batch of `rows`. An empty one needs a
    stand-in."""
    count = micro_batches(rows, size, micro_batch_size)
    return micro_cuts(share(rows, size, rank), micro_batch_size, count)


def total_rows(rows: int, size: int, micro_batch_size: int | None) -> list[int]:
    """Return how many rows all ranks together have in each micro-batch of a total batch."""
    # A share has one of two lengths. Compute each once instead of looping over the ranks, because
    # a run may have thousands.
    count = micro_batches(rows, size, micro_batch_size)
    each, more = divmod(rows, size)  # `more` shares have one row more than `each`
    small = micro_cuts((0, each), micro_batch_size, count)
    large = micro_cuts((0, each + 1), micro_batch_size, count)
    return [
        (size - more) * (b - a) + more * (d - c)
        for (a, b), (c, d) in zip(small, large, strict=True)
    ]


def all_have(smallest: int, part: int) -> bool:
    """Return whether micro-batch `part` has rows on every rank, if the smallest share has
    `smallest` rows."""
    # `micro_cuts` leaves no micro-batch empty while a share has enough rows, so `smallest` rows
    # fill the first `smallest` micro-batches.
    return smallest > part


def locate(samples: int, epoch_length: int) -> tuple[int, int]:
    """Return (epoch, offset in it) of the position `samples`, if all epochs have `epoch_length`."""
    return divmod(samples, epoch_length)


def stand_in(rows: Sequence[T], micro_batch_size: int | None) -> list[T]:
    """Return the rows that a rank without rows runs: the first row, repeated if allowed."""
    # Twice, because BatchNorm refuses to train on one value per channel; but never more rows than
    # a micro-batch may have.
    return [rows[0]] * min(2, micro_batch_size or 2)
