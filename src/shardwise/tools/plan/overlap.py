"""The time of a stage's forward and backward with concurrent collectives, as the engine runs them.

There are two queues: computation, unit by unit, and collectives, one after the other in order of
their start. Sharded parameters are gathered one unit ahead, and a unit waits for its own
gather. A bucket starts its reduction when its unit's backward has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

AHEAD = 1
"""How many units ahead a gather starts."""


@dataclass(frozen=True)
class UnitTimes:
    """Seconds of a unit for one micro-batch: computation, gather, and reduction of gradients."""

    forward: float
    backward: float
    gather: float = 0.0
    reduce: float = 0.0


@dataclass(frozen=True)
class Passed:
    """The end of a pass: of its computation, and of its last collective, in seconds."""

    computed: float
    reduced: float


def forward_pass(units: Sequence[UnitTimes], *, hidden: float = 1.0) -> Passed:
    """Return the times of a forward over `units`.

    `hidden` is the fraction of a collective that does not slow down computation: 1 if separate
    hardware moves the bytes.
    """
    return _pass([(unit.forward, unit.gather, 0.0) for unit in units], hidden)


def backward_pass(
    units: Sequence[UnitTimes], *, reduced: bool, hidden: float = 1.0, overlap: bool = True
) -> Passed:
    """Return the times of a backward over `units`, given in the order of forward.

    `reduced`: the gradients of this micro-batch are reduced, in parallel with backward, or after
    it without `overlap`.
    """
    turns = [(u.backward, u.gather, u.reduce if reduced else 0.0) for u in reversed(units)]
    if overlap:
        return _pass(turns, hidden)
    passed = _pass([(compute, gather, 0.0) for compute, gather, _ in turns], hidden)
    after = sum(reduction for *_, reduction in turns)
    return Passed(passed.computed, passed.computed + after)


def _pass(turns: Sequence[tuple[float, float, float]], hidden: float) -> Passed:
    """Return the times of `turns`: (compute, gather before it, reduction after it), in seconds."""
    clock = queue = 0.0
    gathered: list[float] = []
    for number, (compute, _, reduction) in enumerate(turns):
        while len(gathered) < min(len(turns), number + 1 + AHEAD):
            gather = turns[len(gathered)][1]
            # The gather of the next unit starts with this unit's turn: its own is already queued.
            start = max(queue, clock)
            queue = start + gather if gather else queue
            # The part of a collective that is not hidden takes time away from computation.
            clock += (1 - hidden) * gather
            gathered.append(queue if gather else 0.0)
        # A unit starts when the one before it has ended and its own parameters have arrived.
        clock = max(clock, gathered[number]) + compute
        if reduction:
            queue = max(queue, clock) + reduction
            clock += (1 - hidden) * reduction
    return Passed(clock, max(clock, queue))
