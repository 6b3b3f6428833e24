"""Computes how long a pipeline schedule takes, from the times of its stages and sends.

It uses the engine's own schedule tables (parallel/pipeline/schedule.py). If all stages take the
same time, gpipe, 1f1b and interleaved schedules have a closed form (Narayanan et al., 2021):
(m + (p - 1) / v) (f + b) for m micro-batches, p ranks and v stages per rank. Here f and b are the
total forward and backward times of a rank's stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

from shardwise.parallel.pipeline import schedule as tables
from shardwise.parallel.pipeline.schedule import Action

Kind = Literal["F", "B", "I", "W"]
Times = tuple[float, ...]

EVEN = 1e-9
"""Stage times count as equal if they differ by less than this fraction."""


def pipeline_seconds(
    name: str,
    ranks: int,
    micros: int,
    forward: Sequence[float],
    backward: Sequence[float],
    send: float = 0.0,
) -> float:
    """Return the time in seconds from the first forward pass's start to the last backward's end.

    `forward` and `backward` are each stage's times per micro-batch, in seconds. Stage s runs on
    rank s % `ranks`. `send` is the time in seconds of a message between two stages. Ranks keep
    computing during a send.

    Raises ConfigError if the schedule does not support this number of micro-batches.
    """
    if ranks == 1:
        return micros * (sum(forward) + sum(backward))
    # The closed form is much faster than simulating the schedule, and a search needs the times of
    # thousands of schedules.
    even = _even(forward) and _even(backward)
    if even and send == 0 and name in ("gpipe", "1f1b", "interleaved"):
        stages = len(forward) // ranks
        whole = stages * (forward[0] + backward[0])
        if name != "interleaved" or micros % ranks == 0:
            return (micros + (ranks - 1) / stages) * whole
    return _walked(name, ranks, micros, tuple(forward), tuple(backward), send)


def _even(times: Sequence[float]) -> bool:
    return max(times) - min(times) <= EVEN * max(times)


@lru_cache(maxsize=4096)
def _walked(
    name: str, ranks: int, micros: int, forward: Times, backward: Times, send: float
) -> float:
    """Return a schedule's length in seconds, by simulating the actions in its table.

    The two parts of a split backward pass (I and W) each take half of its time.
    """
    stages = len(forward)
    rows = [tables.actions_of(name, ranks, stages, micros, rank) for rank in range(ranks)]
    halves = tuple(each / 2 for each in backward)
    times: dict[str, Times] = {"F": forward, "B": backward, "I": halves, "W": halves}
    ends: dict[tuple[int, str, int], float] = {}
    clocks, positions = [0.0] * ranks, [0] * ranks
    left = sum(map(len, rows))
    while left:
        before = left
        for rank, row in enumerate(rows):
            # A rank runs its actions in order, up to the first one whose input is not ready yet.
            while positions[rank] < len(row):
                action = row[positions[rank]]
                ready = _ready(action, stages, ends, send)
                if ready is None:
                    break
                end = max(clocks[rank], ready) + times[action.kind][action.stage]
                # The input part (I) of a split backward pass already produces the gradient that the
                # previous stage waits for.
                sent = "B" if action.kind == "I" else action.kind
                ends[action.stage, sent, action.micro] = clocks[rank] = end
                positions[rank] += 1
                left -= 1
        assert left < before, "the schedule waits for itself"
    return max(clocks)


def _ready(
    action: Action, stages: int, ends: dict[tuple[int, str, int], float], send: float
) -> float | None:
    """Return the time when an action's inputs are ready, or None if that time is not known yet."""
    stage, micro = action.stage, action.micro
    # The weight part (W) of a split backward pass depends only on its input part (I).
    if action.kind == "W":
        return ends.get((stage, "B", micro))
    if action.kind == "F":
        if stage == 0:
            return 0.0
        before = ends.get((stage - 1, "F", micro))
        return None if before is None else before + send
    # A backward pass needs the same stage's forward pass, and the gradient from the next stage.
    own = ends.get((stage, "F", micro))
    if stage == stages - 1 or own is None:
        return own
    after = ends.get((stage + 1, "B", micro))
    return None if after is None else max(own, after + send)
