"""The length of a pipeline's schedule, from the times of its stages and of the sends between them.

The tables are those that the engine runs (parallel/pipeline/schedule.py). If all stages take
equally long, the length of gpipe, 1f1b and interleaved schedules has a closed form (Narayanan et
al., 2021): (m + (p - 1) / v) (f + b), where f and b are sums over all v stages of a rank.
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
"""Stages whose times differ by less than this fraction count as equal."""


def pipeline_seconds(
    name: str,
    ranks: int,
    micros: int,
    forward: Sequence[float],
    backward: Sequence[float],
    send: float = 0.0,
) -> float:
    """Return the seconds from the first forward to the last backward.

    `forward` and `backward` are the seconds of each stage and micro-batch; stage s runs on rank
    s % `ranks`. `send` is the time of a message between two stages, during which ranks compute.

    Raises ConfigError if the schedule cannot have this number of micro-batches.
    """
    if ranks == 1:
        return micros * (sum(forward) + sum(backward))
    # The closed form is much faster than the walk, and a search asks for thousands of schedules.
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
    """Return the length of the schedule's table, action by action.

    The two parts of a split backward (I and W) take half of its time each.
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
            # A rank runs its row in order, up to the first action whose input does not exist yet.
            while positions[rank] < len(row):
                action = row[positions[rank]]
                ready = _ready(action, stages, ends, send)
                if ready is None:
                    break
                end = max(clocks[rank], ready) + times[action.kind][action.stage]
                # The backward for inputs (I) already sends the gradient of a whole backward.
                sent = "B" if action.kind == "I" else action.kind
                ends[action.stage, sent, action.micro] = clocks[rank] = end
                positions[rank] += 1
                left -= 1
        assert left < before, "the schedule waits for itself"
    return max(clocks)


def _ready(
    action: Action, stages: int, ends: dict[tuple[int, str, int], float], send: float
) -> float | None:
    """Return when the inputs of an action exist, or None if they have not been computed."""
    stage, micro = action.stage, action.micro
    # The weight part of a split backward needs only its own input part.
    if action.kind == "W":
        return ends.get((stage, "B", micro))
    if action.kind == "F":
        if stage == 0:
            return 0.0
        before = ends.get((stage - 1, "F", micro))
        return None if before is None else before + send
    # A backward needs its own forward, and the gradient from the next stage.
    own = ends.get((stage, "F", micro))
    if stage == stages - 1 or own is None:
        return own
    after = ends.get((stage + 1, "B", micro))
    return None if after is None else max(own, after + send)
