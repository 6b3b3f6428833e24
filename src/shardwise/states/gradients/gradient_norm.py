"""Computes the global gradient norm and the coefficient that clips gradients by it.

A rank squares the sums of its own intervals, bucket by bucket as they come (`GradientNorm`);
`engine/exchange.py` adds the squares of all ranks, and of all pipeline stages. The update
multiplies gradients by `clip_coefficient`, together with the one division of the step.

    bucket's sum ─▶ squared_sum ─┐
    bucket's sum ─▶ squared_sum ─┼─▶ squared() ─▶ exchange over ranks ─▶ sqrt ─▶ clip_coefficient
    ...                          ┘
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set

import torch
from torch import Tensor

from shardwise.layout.bucket_layout import Piece
from shardwise.states.gradients.gradient_accumulator import GradientBucket, Summation
from shardwise.states.storage.squared_sums import squared_sum
from shardwise.states.storage.storage import MemoryStorage


def clip_coefficient(norm: float, max_norm: float | None) -> float:
    """The factor that clips gradients of the global 2-norm `norm` to `max_norm`; 1 without one.

    The formula is that of torch.nn.utils.clip_grad_norm_.
    """
    return 1.0 if max_norm is None else min(1.0, max_norm / (norm + 1e-6))


class GradientNorm:
    """Squares the gradient sums that `buckets` hold on rank `rank`, each once.

    The squares of the buckets `elsewhere` are counted by another rank that has the same.
    """

    def __init__(
        self,
        buckets: Sequence[GradientBucket],
        summation: Summation,
        rank: int,
        elsewhere: Set[int] = frozenset(),
    ) -> None:
        self._buckets = buckets
        self._counted = [bucket for bucket in buckets if bucket.index not in elsewhere]
        self._elsewhere = elsewhere
        self._exact_row = summation.exact_row
        self._rank = rank
        self._squares: dict[int, Tensor] = {}

    def follow(self, came: Iterable[GradientBucket]) -> None:
        """Square each sum as it comes, while others are still on their way."""
        for bucket in came:
            if bucket.accumulator.is_complete and bucket.index not in self._elsewhere:
                self._squares[bucket.index] = self._square(bucket)

    def forget(self, numbers: Iterable[int]) -> None:
        """Drop the squares of the buckets `numbers`, whose sums will change."""
        for number in numbers:
            self._squares.pop(number, None)

    def renew(self, numbers: Iterable[int]) -> None:
        """Square the buckets `numbers` again: user code has changed their sums."""
        self.forget(numbers)
        for bucket in (self._buckets[number] for number in numbers):
            in_memory = isinstance(bucket.reduced, MemoryStorage) or self._exact_row is not None
            bucket.squares = None if in_memory else self._square_in_fp64(bucket)

    def clear(self) -> None:
        """Forget the squares of this step."""
        self._squares.clear()

    def squared(self) -> Tensor:
        """The sum of squares of this rank's own intervals: an fp64 scalar on its device, or the
        row of an exact sum."""
        parts = [
            self._square(bucket) if (known := self._squares.get(bucket.index)) is None else known
            for bucket in self._counted
        ]
        if not parts:
            return torch.zeros((), dtype=torch.float64)
        return torch.stack([part.to(parts[0].device) for part in parts]).sum(0)

    def squared_in_fp64(self) -> Tensor:
        """The same where squares of fp32 numbers overflow; slower."""
        parts = [self._square_in_fp64(bucket).cpu() for bucket in self._counted]
        return torch.stack(parts).sum(0) if parts else torch.zeros((), dtype=torch.float64)

    def _own(self, bucket: GradientBucket) -> tuple[int, int]:
        """This rank's interval, counted in what the bucket's sum holds: of what several ranks have
        whole, each squares its interval alone, so that none is counted twice."""
        first, end = bucket.layout.interval(self._rank)
        return first - bucket.own[0], end - bucket.own[0]

    def _square(self, bucket: GradientBucket) -> Tensor:
        own = self._own(bucket)
        if self._exact_row is not None:
            return self._exact_row(bucket.reduced, own)
        if bucket.squares is not None:
            return bucket.squares
        assert isinstance(bucket.reduced, MemoryStorage)
        return squared_sum(bucket.reduced.tensor[slice(*own)])

    def _square_in_fp64(self, bucket: GradientBucket) -> Tensor:
        own = self._own(bucket)
        if self._exact_row is not None:
            return self._exact_row(bucket.reduced, own, wide=True)
        total = torch.zeros((), dtype=torch.float64)
        for index, (start, stop) in enumerate(bucket.reduced.spans):
            low, high = max(start, own[0]), min(stop, own[1])
            value = bucket.reduced.take(index)
            if low < high:
                total += squared_sum(_in_fp64(value[low - start : high - start])).cpu()
            bucket.reduced.put(index, changed=False)
        return total

    def nonfinite(self) -> list[int]:
        """The parameters whose reduced gradient is not finite in what this rank holds."""
        bad = set()
        for bucket in self._buckets:
            for index, (first, end) in enumerate(bucket.reduced.spans):
                value, start = bucket.reduced.take(index), bucket.own[0] + first
                pieces = bucket.layout.pieces(start, bucket.own[0] + end)
                bad |= {piece.parameter for piece in pieces if not _is_finite(value, start, piece)}
                bucket.reduced.put(index, changed=False)
        return sorted(bad)


def _is_finite(value: Tensor, start: int, piece: Piece) -> bool:
    """Whether `piece` is finite in `value`, which begins at element `start` of the bucket."""
    return bool(torch.isfinite(value[piece.start - start : piece.end - start]).all())


def _in_fp64(values: Tensor) -> Tensor:
    return values.to(torch.complex128 if values.is_complex() else torch.float64)
