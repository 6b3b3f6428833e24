"""Defines schedules: the order of the forward and backward passes on each rank.

torch.distributed.pipelining builds most schedules, as tables with a row of actions per rank. This
module builds the table for 1f1b, which torch lacks. `runner.py` runs the actions.

- gpipe: all forward passes, then all backward passes (Huang et al., 2019).
- 1f1b: each backward pass as early as possible, so that a rank holds few micro-batches
  (PipeDream-Flush, Narayanan et al., 2021).
- interleaved: 1f1b with several stages per rank (Narayanan et al., 2021).
- zero-bubble: backward passes in two halves; the second one fills gaps (ZB1P, Qi et al., 2023).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, Literal

from torch import nn

from shardwise.errors import ConfigError

_NAMES = {
    "gpipe": "LoopedBFS",
    "interleaved": "Interleaved1F1B",
    "zero-bubble": "InterleavedZeroBubble",
}

ActionKind = Literal["F", "B", "I", "W"]


@dataclass(frozen=True)
class Action:
    """One action of a schedule: a forward or backward pass of a micro-batch on a stage.

    F is a forward pass and B a backward pass. A backward pass may be split in two: I computes the
    gradients of the stage's inputs, then W computes the gradients of its parameters.
    """

    stage: int
    kind: ActionKind
    micro: int


ScheduleTable = tuple[tuple[Action | None, ...], ...]
"""The actions of each rank, one per time slot, with None for an idle slot."""


@lru_cache(maxsize=64)
def table(name: str, ranks: int, stages: int, micros: int) -> ScheduleTable:
    """Return a schedule's table. Stage s is on rank s % ranks.

    Raises ConfigError if the schedule does not support `micros` micro-batches.
    """
    if name == "1f1b" and stages == ranks:
        rows = []
        for rank in range(ranks):
            # Warm up with one forward pass per later stage. Then alternate forward and backward
            # passes, and finish with the remaining backward passes.
            ahead = min(ranks - 1 - rank, micros)
            row = [Action(rank, "F", micro) for micro in range(ahead)]
            for micro in range(micros - ahead):
                row += [Action(rank, "F", ahead + micro), Action(rank, "B", micro)]
            row += [Action(rank, "B", micro) for micro in range(micros - ahead, micros)]
            rows.append(tuple(row))
        return tuple(rows)
    # Imported on first use, because importing it at the start would cost every rank seconds.
    from torch.distributed.pipelining.schedules import get_schedule_class

    stages_here = [_Stage(stage, stages, ranks) for stage in range(0, stages, ranks)]
    try:
        schedule: Any = get_schedule_class(_NAMES[name])(stages_here, micros)
    except ValueError as error:
        raise ConfigError(
            f"--schedule {name} on {ranks} workers does not support {micros} micro-batches "
            f"({error}). Write --microbatches with a multiple of {ranks}."
        ) from error
    return tuple(
        tuple(
            None if action is None else _parse(str(action)) for action in schedule.pipeline_order[r]
        )
        for r in range(ranks)
    )


class _Stage(SimpleNamespace):
    """A stand-in for a stage, with the attributes that torch's schedules read."""

    def __init__(self, number: int, stages: int, ranks: int) -> None:
        super().__init__(
            stage_index=number,
            num_stages=stages,
            group_size=ranks,
            group_rank=0,
            group=None,
            is_first=number == 0,
            is_last=number == stages - 1,
            has_backward=True,
            submod=nn.Identity(),
            stage_index_to_group_rank=None,
        )


def _parse(text: str) -> Action:
    match = re.fullmatch(r"(\d+)([FBIW])(\d+)", text)
    assert match is not None, f"unknown action in torch's schedule: {text}"
    stage, kind, micro = match.groups()
    return Action(int(stage), kind, int(micro))  # type: ignore[arg-type]


def actions_of(name: str, ranks: int, stages: int, micros: int, rank: int) -> list[Action]:
    return [action for action in table(name, ranks, stages, micros)[rank] if action is not None]


def idle_fraction(
    name: str,
    ranks: int,
    stages: int,
    micros: int,
    times: Mapping[ActionKind, Sequence[float]],
) -> float:
    """Return the fraction of time that ranks spend waiting, from 0 to 1.

    `times` holds the duration of each kind of action in seconds, by stage. Communication is assumed
    to take no time.
    """
    rows = [actions_of(name, ranks, stages, micros, rank) for rank in range(ranks)]
    end = max(_simulated(rows, times))
    busy = sum(times[action.kind][action.stage] for row in rows for action in row)
    return 1.0 - busy / (ranks * end) if end > 0 else 0.0


def _simulated(
    rows: Sequence[Sequence[Action]], times: Mapping[ActionKind, Sequence[float]]
) -> list[float]:
    """Simulate the schedule in `rows`. Return each rank's finish time in seconds."""
    stages = len(times["F"])
    end_times: dict[Action, float] = {}
    clocks, positions = [0.0] * len(rows), [0] * len(rows)
    while any(position < len(row) for position, row in zip(positions, rows, strict=True)):
        has_progressed = False
        for rank, row in enumerate(rows):
            while positions[rank] < len(row):
                action = row[positions[rank]]
                # A rank runs its actions in order, so it waits here until the next one is ready.
                needs = _needed(action, stages, end_times)
                if needs is None:
                    break
                clocks[rank] = max(clocks[rank], needs) + times[action.kind][action.stage]
                end_times[action] = clocks[rank]
                positions[rank] += 1
                has_progressed = True
        assert has_progressed, "the schedule has a deadlock"
    return clocks


def _needed(action: Action, stages: int, end_times: Mapping[Action, float]) -> float | None:
    """Return when the inputs of `action` are ready, or None if `end_times` lacks one of them."""
    stage = action.stage

    def end_of(other: int, *kinds: ActionKind) -> float | None:
        ends = (end_times.get(Action(other, kind, action.micro)) for kind in kinds)
        return next((end for end in ends if end is not None), None)

    if action.kind == "F":
        return 0.0 if stage == 0 else end_of(stage - 1, "F")
    if action.kind == "W":
        return end_of(stage, "I")
    own = end_of(stage, "F")
    after = own if stage == stages - 1 else end_of(stage + 1, "B", "I")
    return None if own is None or after is None else max(own, after)
