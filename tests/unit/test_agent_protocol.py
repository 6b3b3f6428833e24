"""What launcher and agents tell each other: only what they would say is taken."""

import json
from dataclasses import asdict
from random import Random
from typing import Any

import pytest

from shardwise.launch.failure_report import ExitStatus
from shardwise.launch.local_workers import HostTask
from shardwise.launch.ssh import protocol
from shardwise.launch.worker import WorkerStreams
from shardwise.net.error_file import ErrorReport
from shardwise.net.progress import Progress
from tests.bad_input.drawing import _ANSWERS, _MESSAGES, _garbled


def take(kinds: protocol.Kinds, line: bytes) -> list[protocol.Message]:
    taken: list[protocol.Message] = []
    protocol.MessageReader(kinds, taken.append, lambda noise: None).feed(line)
    return taken


@pytest.mark.parametrize(
    ("kinds", "messages"), [(protocol.TO_AGENT, _MESSAGES), (protocol.FROM_AGENT, _ANSWERS)]
)
def test_what_is_garbled_is_refused(kinds: protocol.Kinds, messages: dict[str, Any]) -> None:
    for kind, fields in messages.items():
        assert take(kinds, protocol.encode(kind, **fields)) == [{"kind": kind, **fields}]
    for seed in range(200):
        with pytest.raises(protocol.ProtocolError):
            take(kinds, _garbled(Random(seed), messages))


def test_a_line_without_end() -> None:
    with pytest.raises(protocol.ProtocolError, match="a line of more than"):
        take(protocol.TO_AGENT, b"x" * (protocol.MOST + 1))


OUTLET = WorkerStreams(drawn=(1, 2), window=(24, 80))
TASK = HostTask(
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
    assert as_json(protocol.build(HostTask, task, outlet=OUTLET)) == as_json(TASK)
    report = ErrorReport(rank=0, time=1.0, secondary=False, message="", text="", at_fault=(1,))
    for value in (OUTLET, ExitStatus(rank=0, code=1, time=1), Progress(step=1, kept=0), report):
        assert as_json(protocol.build(type(value), as_json(value))) == as_json(value)


@pytest.mark.parametrize(
    "change", [{"rank": "0"}, {"code": 1.5}, {"more": 1}, {"stopped": 1}, {"time": True}]
)
def test_what_cannot_be_built(change: dict[str, Any]) -> None:
    with pytest.raises(protocol.ProtocolError):
        protocol.build(ExitStatus, as_json(ExitStatus(rank=0, code=1, time=1.0)) | change)
