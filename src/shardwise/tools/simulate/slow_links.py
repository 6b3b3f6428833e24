"""Says how long groups stand still at a boundary, for the bytes that their links carry then.

A group sends its difference to each of the others (all groups unpack the same bytes), and its
link carries as much in the other direction meanwhile. Without groups, gradients cross the same
link at every step, as in an all-reduce in which each side sends every part twice.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.config.outer_optimizer import AveragingRule, packed_bytes

MEGABIT = 1e6 / 8
"""Bytes."""

GRADIENT = 4
"""Bytes of an element of a gradient: 16-bit ones are reduced in fp32 too."""


@dataclass(frozen=True, kw_only=True)
class SlowLinks:
    """Links of `megabits` per second, one for each of `groups`, for `parameters` in all."""

    groups: int
    parameters: float
    megabits: float

    def boundary_bytes(self, rule: AveragingRule) -> float:
        """Bytes that the link of one group carries at a boundary, in each direction."""
        # Masters, whose differences are sent, are fp32.
        return (self.groups - 1) * packed_bytes(rule.wire, round(self.parameters), 4)

    def boundary_seconds(self, rule: AveragingRule, step: float) -> float:
        """Seconds that the steps stand still for it, where a step takes `step`: what is sent beside
        steps (`late`) holds them up only by what these leave over."""
        seconds = self.boundary_bytes(rule) / (self.megabits * MEGABIT)
        return max(0.0, seconds - rule.late * step)

    @property
    def gradient_seconds(self) -> float:
        """Seconds of the gradients of one step without groups."""
        sent = 2 * (self.groups - 1) / self.groups * GRADIENT * self.parameters
        return sent / (self.megabits * MEGABIT)
