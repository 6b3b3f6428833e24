"""Predicts a stage's forward and backward time, with collectives overlapped as in the engine.

There are two queues. One runs the computation unit by unit, and the other runs one collective after
another, in launch order. Sharded parameters are gathered one unit ahead, and a unit waits for its
own gather. A unit's gradients are reduced once its backward pass is complete.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

AHEAD = 1
"""Number of units that are gathered ahead of the computation."""


@dataclass(frozen=True)
class UnitTimes:
    """Times of a unit for one micro-batch, in seconds.

    `forward` and `backward` are computation, `gather` is the all-gather of the unit's parameters,
    and `reduce` is the reduction of its gradients.
    """

    forward: float
    backward: float
    gather: float = 0.0
    reduce: float = 0.0


@dataclass(frozen=True)
class Passed:
    """The times in seconds at which a pass finishes its computation and its last collective."""

    computed: float
    reduced: float


def forward_pass(units: Sequence[UnitTimes], *, hidden: float = 1.0) -> Passed:
    """Return the times of a forward pass over `units`.

    `hidden` is the fraction of a collective's time that does not slow down computation. It is 1 if
    separate hardware moves the data.
    """
    return _pass([(unit.forward, unit.gather, 0.0) for unit in units], hidden)


def backward_pass(
    units: Sequence[UnitTimes], *, reduced: bool, hidden: float = 1.0, overlap: bool = True
) -> Passed:
    """Return the times of a backward pass over `units` (listed in forward order).

    If `reduced` is true, this micro-batch reduces its gradients. If `overlap` is true, they are
    reduced during the backward pass, and otherwise after it. `hidden` is as in `forward_pass`.
    """
    turns = [(u.backward, u.gather, u.reduce if reduced else 0.0) for u in reversed(units)]
    if overlap:
        return _pass(turns, hidden)
    passed = _pass([(compute, gather, 0.0) for compute, gather, _ in turns], hidden)
    after = sum(reduction for *_, reduction in turns)
    return Passed(passed.computed, passed.computed + after)


def _pass(turns: Sequence[tuple[float, float, float]], hidden: float) -> Passed:
    """Return the times of a pass over `turns`, one per unit.

    A turn is a tuple of seconds: computation, the gather that must precede it, and the reduction
    that follows it.
    """
    clock = queue = 0.0
    gathered: list[float] = []
    for number, (compute, _, reduction) in enumerate(turns):
        while len(gathered) < min(len(turns), number + 1 + AHEAD):
            gather = turns[len(gathered)][1]
            # At the start of a unit's turn its own gather is already queued, so launch the next
            # unit's gather.
            start = max(queue, clock)
            queue = start + gather if gather else queue
            # The part of a collective that is not hidden delays the computation.
            clock += (1 - hidden) * gather
            gathered.append(queue if gather else 0.0)
        # A unit starts when the previous unit is complete and its own parameters are gathered.
        clock = max(clock, gathered[number]) + compute
        if reduction:
            queue = max(queue, clock) + reduction
            clock += (1 - hidden) * reduction
    return Passed(clock, max(clock, queue))
