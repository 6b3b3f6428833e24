"""Messages between launcher and agents: invalid ones are rejected."""

import json
from dataclasses import asdict
from random import Random
from typing import Any

import pytest

from shardwise.launch.failure_report import ExitStatus
from shardwise.launch.run_spec import Meeting, RunSpec
from shardwise.launch.ssh import protocol
from shardwise.launch.worker import WorkerStreams
from shardwise.net.error_file import ErrorReport
from shardwise.net.hosts import Host, Share
from shardwise.net.progress import Progress
from tests.bad_input.drawing import _ANSWERS, _MESSAGES, _garbled


def take(kinds: protocol.Kinds, line: bytes) -> list[protocol.Message]:
    taken: list[protocol.Message] = []
    protocol.MessageReader(kinds, taken.append, lambda noise: None).feed(line)
    return taken


@pytest.mark.parametrize(
    ("kinds", "messages"), [(protocol.TO_AGENT, _MESSAGES), (protocol.FROM_AGENT, _ANSWERS)]
)
def test_refuses_garbled_messages(kinds: protocol.Kinds, messages: dict[str, Any]) -> None:
    for kind, fields in messages.items():
        assert take(kinds, protocol.encode(kind, **fields)) == [{"kind": kind, **fields}]
    for seed in range(200):
        with pytest.raises(protocol.ProtocolError):
            take(kinds, _garbled(Random(seed), messages))


def test_refuses_endless_line() -> None:
    with pytest.raises(protocol.ProtocolError, match="a line of more than"):
        take(protocol.TO_AGENT, b"x" * (protocol.MOST + 1))


OUTLET = WorkerStreams(drawn=(1, 2), window=(24, 80))
SHARE = Share(Host("h1", 2, "me"), 0, 2)
SPEC = RunSpec(words=("a", "b"), size=2, shares=(SHARE,), flags={"zero": "2"}, shown=(0, 1))
MEETING = Meeting(address="", port=1, master_port=2)


def as_json(value: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(asdict(value)))
    return found


def test_spec_round_trips() -> None:
    report = ErrorReport(rank=0, time=1.0, secondary=False, message="", text="", at_fault=(1,))
    end, progress = ExitStatus(rank=0, code=1, time=1), Progress(step=1, kept=0)
    for value in (SPEC, MEETING, OUTLET, end, progress, report):
        assert protocol.build(type(value), as_json(value)) == value


@pytest.mark.parametrize(
    "change", [{"rank": "0"}, {"code": 1.5}, {"more": 1}, {"stopped": 1}, {"time": True}]
)
def test_refuses_invalid_spec(change: dict[str, Any]) -> None:
    with pytest.raises(protocol.ProtocolError):
        protocol.build(ExitStatus, as_json(ExitStatus(rank=0, code=1, time=1.0)) | change)
