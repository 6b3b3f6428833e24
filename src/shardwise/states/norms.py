"""The squares of a step's sums, of which the norm is made, and what of them is not finite."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set

import torch
from torch import Tensor

from shardwise.states.accumulator import Summation
from shardwise.states.reduction import Rest
from shardwise.states.squares import squares
from shardwise.states.storage import InMemory


class Norms:
    """Of the sums that `rests` hold on rank `rank`, each squared once.

    The squares of the buckets `elsewhere` are told by another rank that has the same.
    """

    def __init__(
        self,
        rests: Sequence[Rest],
        summation: Summation,
        rank: int,
        elsewhere: Set[int] = frozenset(),
    ) -> None:
        self._rests = rests
        self._told = [rest for rest in rests if rest.index not in elsewhere]
        self._elsewhere = elsewhere
        self._measure = summation.measure
        self._rank = rank
        self._squares: dict[int, Tensor] = {}

    def follow(self, came: Iterable[Rest]) -> None:
        """Square each sum as it comes, while others are still on their way."""
        for rest in came:
            if rest.tally.complete and rest.index not in self._elsewhere:
                self._squares[rest.index] = self._square(rest)

    def forget(self, numbers: Iterable[int]) -> None:
        """The sums of the buckets `numbers` will be others."""
        for number in numbers:
            self._squares.pop(number, None)

    def renew(self, numbers: Iterable[int]) -> None:
        """User code has changed the sums of the buckets `numbers`."""
        for number in numbers:
            rest = self._rests[number]
            self._squares.pop(number, None)
            rest.squares.clear()
            in_memory = isinstance(rest.reduced, InMemory) or self._measure is not None
            rest.told = None if in_memory else self._square_in_fp64(rest)

    def clear(self) -> None:
        """Forget all."""
        self._squares.clear()

    def squared(self) -> Tensor:
        """The sum of squares of this rank's own intervals, as an fp64 scalar on its device, or
        what the summation tells of it."""
        parts = [
            self._square(rest) if (known := self._squares.get(rest.index)) is None else known
            for rest in self._told
        ]
        if not parts:
            return torch.zeros((), dtype=torch.float64)
        return torch.stack([part.to(parts[0].device) for part in parts]).sum(0)

    def squared_in_fp64(self) -> Tensor:
        """The same where squares of fp32 numbers overflow; slower."""
        parts = [self._square_in_fp64(rest).cpu() for rest in self._told]
        return torch.stack(parts).sum(0) if parts else torch.zeros((), dtype=torch.float64)

    def _square(self, rest: Rest) -> Tensor:
        first, end = rest.bucket.interval(self._rank)
        own = first - rest.own[0], end - rest.own[0]
        if self._measure is not None:
            return self._measure(rest.reduced, own)
        if rest.squares.complete:
            return rest.squares.total()
        if rest.told is not None:
            return rest.told
        assert isinstance(rest.reduced, InMemory)
        return squares(rest.reduced.tensor[slice(*own)])

    def _square_in_fp64(self, rest: Rest) -> Tensor:
        first, end = rest.bucket.interval(self._rank)
        own = first - rest.own[0], end - rest.own[0]
        if self._measure is not None:
            return self._measure(rest.reduced, own, wide=True)
        total = torch.zeros((), dtype=torch.float64)
        for index, (start, stop) in enumerate(rest.reduced.spans):
            low, high = max(start, own[0]), min(stop, own[1])
            value = rest.reduced.take(index)
            if low < high:
                total += squares(_in_fp64(value[low - start : high - start])).cpu()
            rest.reduced.put(index, changed=False)
        return total

    def nonfinite(self) -> list[int]:
        """The parameters whose reduced gradient is not finite in what this rank holds."""
        bad = set()
        for rest in self._rests:
            for index, (first, end) in enumerate(rest.reduced.spans):
                value = rest.reduced.take(index)
                start = rest.own[0] + first
                for piece in rest.bucket.pieces(start, rest.own[0] + end):
                    part = value[piece.start - start : piece.end - start]
                    if not bool(torch.isfinite(part).all()):
                        bad.add(piece.parameter)
                rest.reduced.put(index, changed=False)
        return sorted(bad)


def _in_fp64(values: Tensor) -> Tensor:
    return values.to(torch.complex128 if values.is_complex() else torch.float64)
