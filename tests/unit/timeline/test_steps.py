"""The time of steps, from literal traces (times in microseconds, results in seconds)."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.tools.timeline import tables
from shardwise.tools.timeline.slowest import counted, slowest
from shardwise.tools.timeline.steps import StepTimes, clipped, length, minus, steps_of, union

Event = dict[str, Any]

MS = 1000
RANGES = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)).map(sorted).map(tuple))


def event(rank: int, category: str, name: str, begin: int, end: int, **about: Any) -> Event:
    times = {"ts": begin * MS, "dur": (end - begin) * MS, "args": about}
    return {"ph": "X", "pid": rank, "tid": 2, "cat": category, "name": name} | times


def one_step(
    rank: int, begin: int, *, number: int = 1, late: int = 0, wait: int = 0
) -> list[Event]:
    """A step of 100 ms + `late` (in the script) + `wait`, from `begin` on:

    data 0-10, forward 10-40, backward 40-70 with a collective under way from 50 on, then the wait
    for it, the exchange 70-80, the update 80-90.
    """
    t = begin + 70 + wait
    end = t + 30 + late
    return [
        event(rank, "steps", f"step {number}", begin, end, step=number, engine=0),
        event(rank, "data", "next batch", begin, begin + 10),
        event(rank, "compute", "forward", begin + 10, begin + 40),
        event(rank, "compute", "forward 0", begin + 15, begin + 25),
        event(rank, "compute", "backward", begin + 40, begin + 70),
        event(rank, "communication", "all-reduce", begin + 50, t, bytes=4000, dtype="float32"),
        event(rank, "compute", "reduce", begin + 70, t),
        event(rank, "wait", "wait: all-reduce (call 1)", begin + 70, t),
        event(rank, "compute", "exchange", t, t + 10),
        event(rank, "compute", "update", t + 10, t + 20),
    ]


def test_attention_exchanges_are_exposed_communication() -> None:
    exchange = event(0, "attention exchanges", "all-to-all", 1020, 1025, bytes=500)
    (step,) = steps_of([*one_step(rank=0, begin=1000), exchange])[0]
    assert step.nbytes == 4500
    assert step.spent["communication"] == pytest.approx(0.015)
    assert step.spent["forward"] == pytest.approx(0.025)


def test_divides_a_step_into_kinds() -> None:
    (step,) = steps_of(one_step(rank=3, begin=1000, wait=5, late=7))[3]
    assert (step.rank, step.number, step.nbytes) == (3, 1, 4000)
    assert step.seconds == pytest.approx(0.112)
    assert step.spent == pytest.approx(
        {
            "data": 0.010,
            "forward": 0.030,
            "backward": 0.030,
            "communication": 0.015,
            "update": 0.010,
            "checkpoint": 0.0,
            "other": 0.017,
        }
    )
    assert step.exposed == pytest.approx(0.015)
    assert step.hidden == pytest.approx(0.020)
    assert step.waited == pytest.approx(0.005)


def test_each_moment_belongs_to_one_kind() -> None:
    """A wait inside backward is communication, and a concurrent collective is not hidden then."""
    events = [
        event(0, "steps", "step 1", 0, 100, step=1, engine=0),
        event(0, "compute", "backward", 0, 100),
        event(0, "wait", "wait: all-gather (call 1)", 20, 50),
        event(0, "communication", "all-gather", 10, 50, bytes=8),
        event(0, "communication", "reduce-scatter", 30, 60, bytes=8),
        event(0, "checkpoint, in the background", "write", 0, 100),
        event(0, "tiers", "read", 0, 100),
    ]
    (step,) = steps_of(events)[0]
    assert step.spent["backward"] == pytest.approx(0.070)
    assert step.exposed == pytest.approx(0.030)
    assert step.hidden == pytest.approx(0.020)  # 10-20 and 50-60
    assert sum(step.spent.values()) == pytest.approx(step.seconds)


def test_communication_thread_is_hidden_unless_the_rank_waits() -> None:
    """The thread of a Horovod script waits while the rank is in backward."""
    events = [
        event(0, "steps", "step 1", 0, 100, step=1, engine=0),
        event(0, "compute", "backward", 0, 60),
        event(0, "communication", "allreduce grad", 20, 80, bytes=8),
        event(0, "wait beside", "wait: all-reduce (call 1)", 30, 50),
        event(0, "wait beside", "wait: all-reduce (call 1)", 55, 75),
        event(0, "compute", "synchronize", 60, 85),
        event(0, "compute", "update", 85, 90),
    ]
    (step,) = steps_of(events)[0]
    assert step.spent["backward"] == pytest.approx(0.060)
    assert step.exposed == pytest.approx(0.025)
    assert step.hidden == pytest.approx(0.040)  # 20-60
    assert step.waited == pytest.approx(0.015)  # 60-75
    assert step.spent["other"] == pytest.approx(0.010)


def test_cuts_spans_at_steps_and_ignores_other_engines() -> None:
    events = [
        event(0, "steps", "step 1", 0, 50, step=1, engine=0),
        event(0, "steps", "step 2", 50, 100, step=2, engine=0),
        event(0, "steps", "step 1", 0, 90, step=1, engine=1),
        event(0, "data", "next batch", 40, 70),
    ]
    first, second = steps_of(events)[0]
    assert (first.spent["data"], second.spent["data"]) == pytest.approx((0.010, 0.020))


class Counted(dict[str, Any]):
    """An event that counts how often its values are read."""

    reads = 0

    def __getitem__(self, key: str) -> Any:
        Counted.reads += 1
        return super().__getitem__(key)


def test_reads_a_long_trace_in_few_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Counted, "reads", 0)
    events = [Counted(one) for n in range(400) for one in one_step(0, 100 * n, number=n)]
    found = steps_of(events)[0]
    assert {step.nbytes for step in found} == {4000}
    assert len(found) == 400
    assert Counted.reads < 20 * len(events)


def trace(late: dict[int, int], steps: int = 4) -> list[Event]:
    """Return ranks that wait for the last of them, each `late` by so many ms per step."""
    events, worst = [], max(late.values())
    for rank, own in late.items():
        for number in range(steps):
            begin = number * (100 + worst)
            events += one_step(rank, begin, number=number, late=own, wait=worst - own)
    return events


def test_names_the_slowest_rank_and_the_reason() -> None:
    found = slowest(counted(steps_of(trace({0: 0, 1: 0, 2: 50, 3: 0}))))
    assert found is not None
    assert (found.rank, found.kind, found.times, found.steps) == (2, "other", 3, 3)
    assert (found.seconds, found.more) == pytest.approx((0.050, 0.050))
    assert str(found) == (
        "rank 2 is slowest: 50.0 ms per step more than the others, 50.0 ms of it in the script's "
        "own code, outside of forward, backward and step; the others waited for it in 3 of 3 steps"
    )


def test_small_differences_name_no_rank() -> None:
    assert slowest(counted(steps_of(trace({0: 0, 1: 2})))) is None
    assert slowest(counted(steps_of(trace({0: 50})))) is None


def test_drops_the_first_step_if_there_are_more() -> None:
    steps = steps_of(trace({0: 0}, steps=3))
    assert [step.number for step in counted(steps)[0]] == [1, 2]
    assert len(counted(steps_of(one_step(0, 0)))[0]) == 1


def test_sentences_and_json() -> None:
    steps = counted(steps_of(trace({0: 0, 1: 50})))
    first, second = tables.words(steps)
    assert first == (
        "communication: 55.0 ms per step: 20.0 ms (36%) hidden behind other work, 35.0 ms exposed, "
        "including 25.0 ms asleep"
    )
    assert second.startswith("rank 1 is slowest")
    told = tables.as_json(steps, steps)
    assert told["slowest"]["rank"] == 1
    assert [one["waited"] for one in told["ranks"]] == pytest.approx([0.05, 0.0])
    assert len(told["steps"]) == 6
    assert [step.number for step in tables.longest(steps, 1)] == [1, 1]


def test_every_column_is_explained() -> None:
    steps = steps_of(trace({0: 0}))
    for table, first in ((tables.per_rank(steps), 1), (tables.per_step(steps[0]), 2)):
        headings = [str(column.header) for column in table.columns]
        assert [line.split()[0] for line in tables.legend()] == headings[first:]


def covered(intervals: list[tuple[int, int]]) -> set[int]:
    return {moment for begin, end in intervals for moment in range(begin, end)}


@given(RANGES, RANGES, st.integers(0, 30), st.integers(0, 30))
def test_intervals_are_sets_of_moments(one: Any, two: Any, low: int, high: int) -> None:
    a, b = union(one), union(two)
    assert covered(a) == covered(one)
    assert covered(minus(a, b)) == covered(one) - covered(two)
    assert covered(clipped(a, low, high)) == covered(one) & set(range(low, high))
    assert length(a) == len(covered(one))
    assert all(first[1] < second[0] for first, second in pairwise(a))


def test_a_step_without_waiting_is_busy() -> None:
    step = StepTimes(0, 1, 2.0, {"communication": 0.5}, hidden=0.0, waited=0.25, nbytes=0)
    assert step.busy == 1.75
