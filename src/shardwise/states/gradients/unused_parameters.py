"""Handles unused parameters, which get no gradient: nobody waits for them, and no update touches
them.

Which gradients arrive is learned from earlier backwards (`ExpectedGradients`): a bucket starts once
as many have come as before. When the step is made, all ranks know which parameters any of them has
used; a segment of the optimizer, which is updated as one tensor, is cut where used and unused
parameters meet (`cut_by_use`). So their value, moments and step count stay, as with `grad=None` in
torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import optim

from shardwise.layout.bucket_layout import Piece
from shardwise.states.parameters.update_intervals import (
    UpdateInterval,
    UpdateSegment,
    copied,
    is_flat_state,
    runs,
)

PATIENCE = 8
"""Backwards without a gradient after which a parameter is no longer waited for."""


class ExpectedGradients:
    """Learns how many gradients each of `count` parameters gets in a backward."""

    def __init__(self, count: int) -> None:
        self._learned = [0] * count
        self._absent: dict[int, int] = {}
        """By parameter that has stayed away, for how many backwards."""
        self._arrivals = [0] * count

    def begin(self) -> None:
        """A backward begins."""
        self._arrivals = [0] * len(self._learned)

    def arrived(self, index: int) -> None:
        """The gradient of parameter `index` has come; it may come several times."""
        self._arrivals[index] += 1

    @property
    def any_arrived(self) -> bool:
        """Whether the last backward brought any gradient."""
        return any(self._arrivals)

    def unforeseen(self) -> list[int]:
        """The parameters that had more gradients in this backward than in earlier ones."""
        pairs = zip(self._arrivals, self._learned, strict=True)
        return [index for index, (now, before) in enumerate(pairs) if now > before]

    def learn(self, indices: Iterable[int]) -> bool:
        """Remember how often the gradients of the parameters `indices` came, and forget those that
        stay away; whether anything may be expected otherwise now."""
        if self._arrivals == self._learned and not self._absent:
            return False
        for index in indices:
            count = self._arrivals[index]
            if count:
                self._absent.pop(index, None)
                self._learned[index] = max(self._learned[index], count)
            elif self._learned[index]:
                self._absent[index] = self._absent.get(index, 0) + 1
                if self._absent[index] >= PATIENCE:
                    self._learned[index] = 0
                    del self._absent[index]
        return True

    def expected(self, indices: Iterable[int]) -> int:
        """How many gradients the parameters `indices` get in a backward."""
        return sum(self._learned[index] for index in indices)


def cut_by_use(inner: optim.Optimizer, interval: UpdateInterval, used: Sequence[bool]) -> bool:
    """Cut the segments of `interval` whose parameters differ in whether they are `used`, their
    state in `inner` with them; returns whether there was one."""
    found: list[UpdateSegment] = []
    for segment in interval.segments:
        parts = runs(segment.pieces, lambda piece: used[piece.parameter])
        found += [segment] if len(parts) < 2 else _cut(inner, interval, segment, parts)
    is_cut = len(found) != len(interval.segments)
    interval.segments = found
    return is_cut


def _cut(
    inner: optim.Optimizer,
    interval: UpdateInterval,
    segment: UpdateSegment,
    parts: list[list[Piece]],
) -> list[UpdateSegment]:
    """Cut one segment, its state with it: tensors by slices, the rest by copies."""
    state: dict[str, Any] | None = inner.state.pop(segment.tensor, None)
    made = []
    for pieces in parts:
        child = interval.segment(pieces)
        made.append(child)
        if state:
            a, b = child.first - segment.first, child.end - segment.first
            inner.state[child.tensor] = {
                key: value[a:b] if is_flat_state(value, segment.tensor) else copied(value)
                for key, value in state.items()
            }
    return made
