"""What launcher and agents tell each other: only what they would say is taken."""

import json
from dataclasses import asdict
from random import Random
from typing import Any

import pytest

from shardwise.launch import wire
from shardwise.launch.child import Outlet
from shardwise.launch.crew import Task
from shardwise.launch.progress import Progress
from shardwise.launch.report import Report
from shardwise.launch.verdict import End
from tests.bad_input.drawing import _ANSWERS, _MESSAGES, _garbled


def take(kinds: wire.Kinds, line: bytes) -> list[wire.Message]:
    taken: list[wire.Message] = []
    wire.Receiver(kinds, taken.append, lambda noise: None).feed(line)
    return taken


@pytest.mark.parametrize(
    ("kinds", "messages"), [(wire.TO_AGENT, _MESSAGES), (wire.FROM_AGENT, _ANSWERS)]
)
def test_what_is_garbled_is_refused(kinds: wire.Kinds, messages: dict[str, Any]) -> None:
    for kind, fields in messages.items():
        assert take(kinds, wire.encode(kind, **fields)) == [{"kind": kind, **fields}]
    for seed in range(200):
        with pytest.raises(wire.Garbled):
            take(kinds, _garbled(Random(seed), messages))


def test_a_line_without_end() -> None:
    with pytest.raises(wire.Garbled, match="a line of more than"):
        take(wire.TO_AGENT, b"x" * (wire.MOST + 1))


OUTLET = Outlet(drawn=(1, 2), window=(24, 80))
TASK = Task(
    command=("a",),
    flags={},
    size=2,
    first=0,
    count=1,
    address="",
    port=1,
    master_port=2,
    outlet=OUTLET,
)


def as_json(value: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(asdict(value)))
    return found


def test_what_is_sent_is_built_again() -> None:
    task = as_json(TASK)
    task.pop("outlet")
    assert as_json(wire.built(Task, task, outlet=OUTLET)) == as_json(TASK)
    report = Report(rank=0, time=1.0, secondary=False, message="", text="", at_fault=(1,))
    for value in (OUTLET, End(rank=0, code=1, time=1), Progress(step=1, kept=0), report):
        assert as_json(wire.built(type(value), as_json(value))) == as_json(value)


@pytest.mark.parametrize(
    "change", [{"rank": "0"}, {"code": 1.5}, {"more": 1}, {"stopped": 1}, {"time": True}]
)
def test_what_cannot_be_built(change: dict[str, Any]) -> None:
    with pytest.raises(wire.Garbled):
        wire.built(End, as_json(End(rank=0, code=1, time=1.0)) | change)
