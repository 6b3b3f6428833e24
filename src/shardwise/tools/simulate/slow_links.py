"""Says how long islands stand still at a boundary, for the bytes that their links carry then.

An island sends its difference to each of the others (all islands unpack the same bytes), and its
link carries as much in the other direction meanwhile. Without islands, gradients cross the same
link at every step, as in an all-reduce in which each side sends every part twice.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.config.outer_optimizer import IslandRule

MEGABIT = 1e6 / 8
"""Bytes."""

GRADIENT = 4
"""Bytes of an element of a gradient: 16-bit ones are reduced in fp32 too."""


@dataclass(frozen=True, kw_only=True)
class SlowLinks:
    """Links of `megabits` per second, one for each of `islands`, for `parameters` in all."""

    islands: int
    parameters: float
    megabits: float

    def boundary_bytes(self, rule: IslandRule) -> float:
        """Bytes that the link of one island carries at a boundary, in each direction."""
        import torch  # it takes seconds, and nobody waits for it who has no slow link

        from shardwise.islands.wire import Wire

        packed = Wire(rule.wire).nbytes(round(self.parameters), torch.float32)
        return (self.islands - 1) * packed

    def boundary_seconds(self, rule: IslandRule, step: float) -> float:
        """Seconds that the steps stand still for it, where a step takes `step`: what is sent beside
        steps (`late`) holds them up only by what these leave over."""
        seconds = self.boundary_bytes(rule) / (self.megabits * MEGABIT)
        return max(0.0, seconds - rule.late * step)

    @property
    def gradient_seconds(self) -> float:
        """Seconds of the gradients of one step without islands."""
        sent = 2 * (self.islands - 1) / self.islands * GRADIENT * self.parameters
        return sent / (self.megabits * MEGABIT)
