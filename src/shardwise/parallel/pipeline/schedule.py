"""Schedules: the order in which each rank runs its stages, micro-batch by micro-batch.

torch.distributed.pipelining makes most of them as tables of actions, a row for each rank; that of
1f1b, which it has not, is made here. What runs for an action, and what is sent, is this package's
own.

- gpipe: all forwards, then all backwards (Huang et al., 2019); - 1f1b: a backward as soon as there
is one, so that few micro-batches are held (PipeDream-Flush,   Narayanan et al., 2021); -
interleaved: the same with several stages on each rank (ibid.); - zero-bubble: backward in two, what
the stage before waits for and what fills the gaps (ZB1P, Qi   et al., 2023).
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
    """A step of a schedule: micro-batch `micro` on `stage`, its forward (F), its backward (B), or
    the backward in two: for the stage's inputs (I), then for its parameters (W)."""

    stage: int
    kind: ActionKind
    micro: int


ScheduleTable = tuple[tuple[Action | None, ...], ...]
"""The actions of each rank in order; None where it would wait if all took one unit of time."""


@lru_cache(maxsize=64)
def table(name: str, ranks: int, stages: int, micros: int) -> ScheduleTable:
    """The table of a schedule; stage s is on rank s % ranks. Raises ConfigError where the schedule
    cannot have so many micro-batches."""
    if name == "1f1b" and stages == ranks:
        rows = []
        for rank in range(ranks):
            # As many forwards as there are stages after this one, then in turn a forward and a
            # backward, then the remaining backwards.
            ahead = min(ranks - 1 - rank, micros)
            row = [Action(rank, "F", micro) for micro in range(ahead)]
            for micro in range(micros - ahead):
                row += [Action(rank, "F", ahead + micro), Action(rank, "B", micro)]
            row += [Action(rank, "B", micro) for micro in range(micros - ahead, micros)]
            rows.append(tuple(row))
        return tuple(rows)
    # Imported here, because it takes seconds that every rank would wait for at its start.
    from torch.distributed.pipelining.schedules import get_schedule_class

    mine = [_Stage(stage, stages, ranks) for stage in range(0, stages, ranks)]
    try:
        made: Any = get_schedule_class(_NAMES[name])(mine, micros)
    except ValueError as error:
        raise ConfigError(
            f"--schedule {name} on {ranks} workers cannot have {micros} micro-batches ({error}): "
            f"write --microbatches with a multiple of {ranks}."
        ) from error
    return tuple(
        tuple(None if action is None else _parse(str(action)) for action in made.pipeline_order[r])
        for r in range(ranks)
    )


class _Stage(SimpleNamespace):
    """The attributes of a stage that torch's schedules read to make their tables; it runs
    nothing."""

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
    found = re.fullmatch(r"(\d+)([FBIW])(\d+)", text)
    assert found is not None, f"torch's schedule has an action that is not known: {text}"
    stage, kind, micro = found.groups()
    return Action(int(stage), kind, int(micro))  # type: ignore[arg-type]


def actions_of(name: str, ranks: int, stages: int, micros: int, rank: int) -> list[Action]:
    """The actions of `rank`, in order."""
    return [action for action in table(name, ranks, stages, micros)[rank] if action is not None]


def idle_fraction(
    name: str,
    ranks: int,
    stages: int,
    micros: int,
    times: Mapping[ActionKind, Sequence[float]],
) -> float:
    """The fraction of time in which ranks wait, from 0 to 1; `times` are by kind and stage."""
    rows = [actions_of(name, ranks, stages, micros, rank) for rank in range(ranks)]
    end = max(_simulated(rows, times))
    busy = sum(times[action.kind][action.stage] for row in rows for action in row)
    return 1.0 - busy / (ranks * end) if end > 0 else 0.0


def _simulated(
    rows: Sequence[Sequence[Action]], times: Mapping[ActionKind, Sequence[float]]
) -> list[float]:
    """The time at which each rank has finished its row, if communication takes no time."""
    stages = len(times["F"])
    done: dict[Action, float] = {}
    clocks, positions = [0.0] * len(rows), [0] * len(rows)
    while any(position < len(row) for position, row in zip(positions, rows, strict=True)):
        moved = False
        for rank, row in enumerate(rows):
            while positions[rank] < len(row):
                action = row[positions[rank]]
                needs = _needed(action, stages, done)
                if needs is None:
                    break
                clocks[rank] = max(clocks[rank], needs) + times[action.kind][action.stage]
                done[action] = clocks[rank]
                positions[rank] += 1
                moved = True
        assert moved, "the schedule waits for itself"
    return clocks


def _needed(action: Action, stages: int, done: Mapping[Action, float]) -> float | None:
    """The time at which the inputs of an action are there; None where it is not known yet."""
    stage = action.stage

    def end_of(other: int, *kinds: ActionKind) -> float | None:
        ends = (done.get(Action(other, kind, action.micro)) for kind in kinds)
        return next((end for end in ends if end is not None), None)

    if action.kind == "F":
        return 0.0 if stage == 0 else end_of(stage - 1, "F")
    if action.kind == "W":
        return end_of(stage, "I")
    own = end_of(stage, "F")
    after = own if stage == stages - 1 else end_of(stage + 1, "B", "I")
    return None if own is None or after is None else max(own, after)
