"""Computes the order of the samples, and divides it into steps, shares and micro-batches.

    epoch        3 1 4 0 5 9 2 6 8 7 10          a function of (seed, epoch, length) alone
    steps        3 1 4 0 5 9 | 2 6 8 7 10        global batches of 6; the last may be short
    shares       3 1 4 , 0 5 9 | 2 6 , 8 7 10    contiguous, one per rank
    micro-batch  3 1 ; 4 , 0 5 ; 9 | ...         of 2 rows; the same number on every rank

Only the shares depend on the number of ranks, so a run has the same steps at any world size. The
position in the data is one integer: the number of samples consumed since training started. All
functions are pure arithmetic.
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
"""Rows [first, end) of a global batch or of an epoch."""


def epoch_order(seed: int, epoch: int, length: int, *, shuffle: bool) -> Tensor | range:
    """Return the dataset indices of `epoch` for all ranks: a (length,) int64 tensor if shuffled.

    Does not draw from any global generator.
    """
    if not shuffle:
        return range(length)
    # Use a separate generator, because the order must not depend on earlier draws by the script.
    generator = torch.Generator().manual_seed(seed_from(seed, "order", epoch))
    return torch.randperm(length, generator=generator)


def indices(order: Tensor | range, rows: Rows) -> Sequence[int]:
    """Return the dataset indices of `rows` of an epoch."""
    part = order[rows[0] : rows[1]]
    return part if isinstance(part, range) else part.tolist()


def steps_per_epoch(length: int, batch_size: int, *, drop_last: bool) -> int:
    """Return the number of global batches in `length` samples.

    A short last batch is included unless `drop_last` is true.
    """
    return length // batch_size if drop_last else -(-length // batch_size)


def used_length(length: int, batch_size: int, *, drop_last: bool) -> int:
    """Return how many of `length` samples an epoch uses."""
    return length // batch_size * batch_size if drop_last else length


def steps(length: int, batch_size: int, offset: int = 0) -> Iterator[Rows]:
    """Yield the global batches as row ranges of the epoch, starting at sample `offset`."""
    for first in range(offset, length, batch_size):
        yield first, min(first + batch_size, length)


def share(rows: int, size: int, rank: int) -> Rows:
    """Return `rank`'s contiguous rows of a global batch. Shares differ by at most one row."""
    cuts = even_cuts(rows, size)
    return cuts[rank], cuts[rank + 1]


def largest_share(rows: int, size: int) -> int:
    """Return the number of rows in the largest share."""
    return -(-rows // size)


def micro_batches(rows: int, size: int, micro_batch_size: int | None) -> int:
    """Return the number of micro-batches in a global batch of `rows` rows.

    The number is at least 1, and the same on all ranks.
    """
    # Use the largest share, so that ranks with one row less have the same number. In the backward
    # pass of each micro-batch, all ranks reduce gradients.
    largest = largest_share(rows, size)
    return max(1, -(-largest // (micro_batch_size or max(1, largest))))


def micro_cuts(rows: Rows, micro_batch_size: int | None, count: int) -> list[Rows]:
    """Split `rows` into `count` micro-batches of `micro_batch_size`; the last may be short.

    If that would leave some micro-batches empty, the rows are spread evenly instead. With fewer
    rows than micro-batches, the last ones are empty.
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
    """Return the rows of `rank`'s micro-batches in a global batch of `rows` rows.

    An empty micro-batch needs a stand-in.
    """
    count = micro_batches(rows, size, micro_batch_size)
    return micro_cuts(share(rows, size, rank), micro_batch_size, count)


def total_rows(rows: int, size: int, micro_batch_size: int | None) -> list[int]:
    """Return the total number of rows on all ranks, for each micro-batch of a global batch."""
    # Shares have only two lengths. Compute each once instead of looping over the ranks, because a
    # run may have thousands.
    count = micro_batches(rows, size, micro_batch_size)
    each, more = divmod(rows, size)  # `more` shares have one row more than `each`
    small = micro_cuts((0, each), micro_batch_size, count)
    large = micro_cuts((0, each + 1), micro_batch_size, count)
    return [
        (size - more) * (b - a) + more * (d - c)
        for (a, b), (c, d) in zip(small, large, strict=True)
    ]


def all_have(smallest: int, part: int) -> bool:
    """Return whether micro-batch `part` has rows on every rank.

    `smallest` is the number of rows in the smallest share.
    """
    # `micro_cuts` leaves no micro-batch empty while a share has enough rows, so `smallest` rows
    # fill the first `smallest` micro-batches.
    return smallest > part


def locate(samples: int, epoch_length: int) -> tuple[int, int]:
    """Return (epoch, offset) for position `samples`, if every epoch has `epoch_length` samples."""
    return divmod(samples, epoch_length)


def stand_in(rows: Sequence[T], micro_batch_size: int | None) -> list[T]:
    """Return rows for a rank that has none: the first row, repeated if possible."""
    # Two rows, because BatchNorm cannot train on one value per channel; but never more than the
    # micro-batch size.
    return [rows[0]] * min(2, micro_batch_size or 2)
