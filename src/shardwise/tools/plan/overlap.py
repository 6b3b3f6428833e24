"""The time of a stage's forward and backward with its collectives beside them, as the engine runs.

Two queues: computation, unit by unit, and collectives, one after the other in the order in which
they start. Sharded parameters are gathered one unit ahead; a unit waits for its own gather. A
gradient's bucket starts its reduction when the unit's backward has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

AHEAD = 1
"""Units whose gather starts before their turn."""


@dataclass(frozen=True)
class UnitTimes:
    """Seconds of a unit for one micro-batch: computation, its gather, its gradients' reduction."""

    forward: float
    backward: float
    gather: float = 0.0
    reduce: float = 0.0


@dataclass(frozen=True)
class Passed:
    """How a pass went: when computation ended, and when the last collective did."""

    computed: float
    reduced: float


def forward_pass(units: Sequence[UnitTimes], *, hidden: float = 1.0) -> Passed:
    """A forward over `units`; `hidden` is the fraction of a collective that computation does not
    feel (1 where other hardware moves the bytes)."""
    return _pass([(unit.forward, unit.gather, 0.0) for unit in units], hidden)


def backward_pass(
    units: Sequence[UnitTimes], *, reduced: bool, hidden: float = 1.0, overlap: bool = True
) -> Passed:
    """A backward over `units`, given in forward's order; `reduced` where this micro-batch's
    gradients are, beside it or, without `overlap`, after it."""
    turns = [(u.backward, u.gather, u.reduce if reduced else 0.0) for u in reversed(units)]
    if overlap:
        return _pass(turns, hidden)
    passed = _pass([(compute, gather, 0.0) for compute, gather, _ in turns], hidden)
    after = sum(reduction for *_, reduction in turns)
    return Passed(passed.computed, passed.computed + after)


def _pass(turns: Sequence[tuple[float, float, float]], hidden: float) -> Passed:
    """Turns of computation, gather before it, reduction after it."""
    clock = queue = 0.0
    gathered: list[float] = []
    for number, (compute, _, reduction) in enumerate(turns):
        while len(gathered) < min(len(turns), number + 1 + AHEAD):
            gather = turns[len(gathered)][1]
            # What is gathered ahead starts with this unit's turn: its own came before.
            start = max(queue, clock)
            queue = start + gather if gather else queue
            clock += (1 - hidden) * gather
            gathered.append(queue if gather else 0.0)
        clock = max(clock, gathered[number]) + compute
        if reduction:
            queue = max(queue, clock) + reduction
            clock += (1 - hidden) * reduction
    return Passed(clock, max(clock, queue))
