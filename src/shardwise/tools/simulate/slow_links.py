"""Computes how long a boundary blocks islands, from the bytes that cross their links.

An island sends the change in its parameters to every other island, and receives their changes over
the same link at the same time. Without islands, gradients cross the same link in every step, in a
ring all-reduce.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.config.outer_optimizer import IslandRule

MEGABIT = 1e6 / 8
"""Bytes per megabit."""

GRADIENT = 4
"""Bytes per gradient element on the link. 16-bit gradients are also reduced in fp32."""


@dataclass(frozen=True, kw_only=True)
class SlowLinks:
    """The links between islands: one link of `megabits` Mbit/s per island.

    `parameters` is the model's parameter count, in elements.
    """

    islands: int
    parameters: float
    megabits: float

    def boundary_bytes(self, rule: IslandRule) -> float:
        """Return the bytes that cross an island's link at a boundary, in each direction."""
        import torch  # takes seconds to import, and only slow links need it

        from shardwise.islands.wire import Wire

        # Every island sends its difference to each other island, over its single link.
        packed = Wire(rule.wire).nbytes(round(self.parameters), torch.float32)
        return (self.islands - 1) * packed

    def boundary_seconds(self, rule: IslandRule, step: float) -> float:
        """Return the time in seconds for which a boundary blocks the islands.

        `step` is the duration of a step in seconds. If `rule.late` is set, the transfer overlaps
        with that many steps, and only the remaining time blocks.
        """
        seconds = self.boundary_bytes(rule) / (self.megabits * MEGABIT)
        return max(0.0, seconds - rule.late * step)

    @property
    def gradient_seconds(self) -> float:
        """The time in seconds that the gradient reduction of one step takes without islands."""
        sent = 2 * (self.islands - 1) / self.islands * GRADIENT * self.parameters
        return sent / (self.megabits * MEGABIT)
