"""Computes the order of the data, and its cut into steps, shares, micro-batches. Pure arithmetic.

    epoch        3 1 4 0 5 9 2 6 8 7 10          a function of (seed, epoch, length) alone
    steps        3 1 4 0 5 9 | 2 6 8 7 10        total batches of 6; the last may be short
    shares       3 1 4 , 0 5 9 | 2 6 , 8 7 10    contiguous, one per rank
    micro-batch  3 1 ; 4 , 0 5 ; 9 | ...         of 2 rows; as many on every rank

Nothing but the cut into shares depends on the number of ranks, so a run at any size sees the same
steps. The position in the data is one integer, the samples consumed since training began.
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
    """The dataset indices of epoch `epoch` in total order, (length,) int64 where shuffled.

    Draws from no global generator.
    """
    if not shuffle:
        return range(length)
    generator = torch.Generator().manual_seed(seed_from(seed, "order", epoch))
    return torch.randperm(length, generator=generator)


def indices(order: Tensor | range, rows: Rows) -> Sequence[int]:
    """The dataset indices of `rows` of an epoch."""
    part = order[rows[0] : rows[1]]
    return part if isinstance(part, range) else part.tolist()


def steps_per_epoch(length: int, batch_size: int, *, drop_last: bool) -> int:
    """The number of total batches in `length` samples; a short last one counts unless dropped."""
    return length // batch_size if drop_last else -(-length // batch_size)


def used_length(length: int, batch_size: int, *, drop_last: bool) -> int:
    """How many of `length` samples an epoch gives."""
    return length // batch_size * batch_size if drop_last else length


def steps(length: int, batch_size: int, offset: int = 0) -> Iterator[Rows]:
    """The total batches from sample `offset` of an epoch on, as rows of the epoch."""
    for first in range(offset, length, batch_size):
        yield first, min(first + batch_size, length)


def share(rows: int, size: int, rank: int) -> Rows:
    """Rank `rank`'s contiguous rows of a total batch; shares differ by a row at most."""
    cuts = even_cuts(rows, size)
    return cuts[rank], cuts[rank + 1]


def largest_share(rows: int, size: int) -> int:
    """The number of rows of the largest share."""
    return -(-rows // size)


def micro_batches(rows: int, size: int, micro_batch_size: int | None) -> int:
    """How many micro-batches a total batch of `rows` makes, alike on all ranks; at least 1."""
    largest = largest_share(rows, size)
    return max(1, -(-largest // (micro_batch_size or max(1, largest))))


def micro_cuts(rows: Rows, micro_batch_size: int | None, count: int) -> list[Rows]:
    """`rows` cut into `count` micro-batches of `micro_batch_size`, of which the last may be short.

    Where that would leave some without rows, all have nearly as many instead, so that none is empty
    while there are enough; with fewer rows than micro-batches the last ones are.
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
    """The micro-batches of `rank` in a total batch of `rows`; an empty one wants a stand-in."""
    count = micro_batches(rows, size, micro_batch_size)
    return micro_cuts(share(rows, size, rank), micro_batch_size, count)


def wholes(rows: int, size: int, micro_batch_size: int | None) -> list[int]:
    """The rows that all ranks together have in each micro-batch of a total batch of `rows`."""
    count = micro_batches(rows, size, micro_batch_size)
    each, more = divmod(rows, size)  # so many shares have a row more
    small = micro_cuts((0, each), micro_batch_size, count)
    large = micro_cuts((0, each + 1), micro_batch_size, count)
    return [
        (size - more) * (b - a) + more * (d - c)
        for (a, b), (c, d) in zip(small, large, strict=True)
    ]


def all_have(smallest: int, part: int) -> bool:
    """Whether micro-batch `part` has rows on every rank, the least of which has `smallest`."""
    return smallest > part


def locate(samples: int, epoch_length: int) -> tuple[int, int]:
    """(epoch, offset in it) of the position `samples`, where every epoch has `epoch_length`."""
    return divmod(samples, epoch_length)


def stand_in(rows: Sequence[T], micro_batch_size: int | None) -> list[T]:
    """What a rank without rows of its own runs: the first row, twice where a micro-batch may be
    that long, since BatchNorm refuses to train on one value per channel."""
    return [rows[0]] * min(2, micro_batch_size or 2)
