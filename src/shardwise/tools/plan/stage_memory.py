"""Predicts the memory of the ranks of a pipeline: micro-batches in flight, by the schedule's table.

A rank holds what forward has saved of each micro-batch whose backward is still to come. How many
these are when a stage begins a forward or a backward, the table says that the engine runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from shardwise.parallel.pipeline import schedule
from shardwise.tools.plan.choice import Choice
from shardwise.tools.plan.memory import Hardware, InFlight, MemoryPlan, predict
from shardwise.tools.plan.record import StepRecord
from shardwise.tools.plan.stage_records import part_of, stage_layers


@dataclass(frozen=True)
class Waiting:
    """The most micro-batches of each stage of a rank that wait for their backward while `stage`
    runs a forward, and while it runs a backward."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]


def predict_pipeline(record: StepRecord, choice: Choice, hardware: Hardware) -> MemoryPlan:
    """The memory of the rank that needs the most; `record` is of one micro-batch of the whole
    model."""
    stages = choice.pipeline * choice.stages_per_rank
    rows = stage_layers(record, stages)
    plans = (_rank(record, choice, hardware, rows, rank) for rank in range(choice.pipeline))
    return max(plans, key=lambda plan: plan.peak)


def _rank(
    record: StepRecord, choice: Choice, hardware: Hardware, rows: Sequence[range], rank: int
) -> MemoryPlan:
    """The memory of `rank`, at the stage where it has its peak."""
    own = list(range(rank, len(rows), choice.pipeline))
    parts = [part_of(record, rows[stage]) for stage in own]
    held = tuple(p for part in parts for p in part.parameters)
    saved = [saved_bytes(part) for part in parts]
    plans = []
    for place, part in enumerate(parts):
        waiting = most_waiting(
            choice.schedule, choice.pipeline, len(rows), choice.micro_batches, rank, place
        )
        sums = [
            sum(count * size for count, size in zip(counts, saved, strict=True))
            for counts in (waiting.forward, waiting.backward)
        ]
        plans.append(predict(part, choice, hardware, parameters=held, in_flight=InFlight(*sums)))
    return max(plans, key=lambda plan: plan.peak)


def saved_bytes(part: StepRecord) -> int:
    """Bytes that forward leaves for backward, of one micro-batch."""
    return sum(each.nbytes for each in part.tensors if each.saved)


@lru_cache(maxsize=4096)
def most_waiting(name: str, ranks: int, stages: int, micros: int, rank: int, place: int) -> Waiting:
    """What waits on `rank` while its stage number `place` runs, the micro-batch at work left out.

    A backward in two parts (zero-bubble) lets go of what was saved at its second.
    """
    waiting = [0] * (stages // ranks)
    most = {"F": (0,) * len(waiting), "B": (0,) * len(waiting)}
    for action in schedule.actions_of(name, ranks, stages, micros, rank):
        here, forward = action.stage // ranks, action.kind == "F"
        if not forward:
            waiting[here] -= 1
        if here == place:
            kind = "F" if forward else "B"
            most[kind] = max(most[kind], tuple(waiting), key=sum)
        if forward or action.kind == "I":
            waiting[here] += 1
    return Waiting(most["F"], most["B"])
