"""Computes how long islands stop at a boundary, from the bytes that their links carry.

An island sends its difference to each of the others (all islands unpack the same bytes), and its
link carries as much in the other direction at the same time. Without islands, gradients cross the
same link at every step, as in an all-reduce where each side sends every part twice.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.config.outer_optimizer import IslandRule

MEGABIT = 1e6 / 8
"""Bytes of a megabit."""

GRADIENT = 4
"""Bytes per gradient element: 16-bit gradients are reduced in fp32, too."""


@dataclass(frozen=True, kw_only=True)
class SlowLinks:
    """One link of `megabits` Mbit/s for each of `islands`, for a model of `parameters` elements."""

    islands: int
    parameters: float
    megabits: float

    def boundary_bytes(self, rule: IslandRule) -> float:
        """Return the bytes that an island's link carries at a boundary, in each direction."""
        import torch  # takes seconds to import, and only slow links need it

        from shardwise.islands.wire import Wire

        # Every island sends to each of the others, over its one link.
        packed = Wire(rule.wire).nbytes(round(self.parameters), torch.float32)
        return (self.islands - 1) * packed

    def boundary_seconds(self, rule: IslandRule, step: float) -> float:
        """Return the seconds that a boundary stops the steps, which take `step` each.

        With `late`, the transfer overlaps steps, and only the rest of it stops them.
        """
        seconds = self.boundary_bytes(rule) / (self.megabits * MEGABIT)
        return max(0.0, seconds - rule.late * step)

    @property
    def gradient_seconds(self) -> float:
        """Seconds that the gradients of one step take without islands."""
        sent = 2 * (self.islands - 1) / self.islands * GRADIENT * self.parameters
        return sent / (self.megabits * MEGABIT)
