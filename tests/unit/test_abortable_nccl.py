"""NCCL with `--survive`, as far as it can be tested without a device."""

from __future__ import annotations

import os
import threading
import time
from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from shardwise.comm import GroupRanks, abortable_nccl
from shardwise.comm.abortable_nccl import AbortableNccl, Communicators
from shardwise.errors import CollectiveError, ConfigError, PeerLost


class Group:
    """A process group whose communicator records its calls, and fails to abort with `error`."""

    def __init__(self, calls: list[str], error: str = "") -> None:
        self.calls, self.error = calls, error

    def _get_backend(self, device: torch.device) -> Any:
        assert device.type == "cuda"
        return SimpleNamespace(
            abort=self._abort,
            _group_start=lambda: self.calls.append("start"),
            _group_end=lambda: self.calls.append("end"),
        )

    def _abort(self) -> None:
        self.calls.append("abort")
        if self.error:
            raise RuntimeError(self.error)


class Server:
    """Status server of rank 0. The ranks in `ended` have ended."""

    rank, abort = 0, None

    def __init__(self) -> None:
        self.ended: set[int] = set()
        self.waits = SimpleNamespace(noted=lambda what, missing: nullcontext())

    def has_ended(self, rank: int) -> bool:
        return rank in self.ended

    def refuse_after_failure(self) -> None:
        pass

    def error_of_another(self, speaker: str, abort: Any = None) -> None:
        return None

    def announce_abort(self, error: Exception) -> None:
        pass

    def blocking_ranks(self, missing: Any) -> Any:
        return SimpleNamespace(abort=None, ranks=[], is_circle=False, waits={})


class Event:
    """An event on a device that completes when `done` is set."""

    done = False

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return Event.done


@pytest.fixture
def transport(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return `finish` of rank 0 of 2, with its server and the calls of its two communicators."""
    monkeypatch.setattr(abortable_nccl, "TICK", 0.01)
    monkeypatch.setattr(abortable_nccl, "VERDICT", 0.1)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(Event, "done", False)
    made = cast(Any, AbortableNccl.__new__(AbortableNccl))
    made.rank, made.size, made.status_server = 0, 2, Server()
    made._group_ranks, made._timeout = GroupRanks.whole(2), timedelta(seconds=30)
    made._communicators = Communicators(made.status_server, [0, 1])
    made.calls = []
    made.first, second = Group(made.calls), Group(made.calls)
    for group in (made.first, second):
        made._communicators.add(cast(Any, group))
    yield made
    made._communicators.close()


def finish(transport: Any) -> None:
    transport.finish(SimpleNamespace(wait=lambda: None))


def test_a_wait_blocks_the_host_until_the_device_has_the_result(transport: Any) -> None:
    timer = threading.Timer(0.1, setattr, (Event, "done", True))
    began = time.monotonic()
    timer.start()
    finish(transport)
    assert time.monotonic() - began >= 0.1
    assert transport.calls == []


def test_a_wait_ends_if_a_rank_is_lost(transport: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    abort = Group._abort

    def end_kernels(group: Group) -> None:
        abort(group)
        Event.done = True

    monkeypatch.setattr(Group, "_abort", end_kernels)
    transport.status_server.ended.add(1)
    with pytest.raises(PeerLost, match="Rank 0 of 2 lost another rank"):
        finish(transport)
    assert transport.calls == ["start", "abort", "abort", "end"]


def test_a_wait_ends_if_a_communicator_cannot_be_aborted(transport: Any) -> None:
    """The other communicators are aborted nevertheless."""
    transport.first.error = "ProcessGroup abort timed out.\nException raised from"
    transport.status_server.ended.add(1)
    message = (
        r"^Rank 0 cannot continue without a lost rank, because NCCL did not abort its work: "
        r"ProcessGroup abort timed out\.$"
    )
    with pytest.raises(CollectiveError, match=message) as raised:
        finish(transport)
    assert not isinstance(raised.value, PeerLost)
    assert transport.calls == ["start", "abort", "abort", "end"]
    transport.host = SimpleNamespace(messages=SimpleNamespace(forget=lambda: None))
    with pytest.raises(CollectiveError, match=message):
        transport.retire()  # instead of waiting for the device


def test_a_wait_ends_after_the_timeout(transport: Any) -> None:
    transport._timeout = timedelta(seconds=0.1)
    with pytest.raises(CollectiveError, match=r"Rank 0 of 2 waited .* in a collective over NCCL"):
        finish(transport)


def test_a_part_that_cannot_connect_is_closed(
    transport: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    class Part(AbortableNccl):
        def __init__(self) -> None:
            pass

        def connect(self) -> None:
            raise PeerLost("lost")

        def retire(self) -> None:
            done.append("retired")

    monkeypatch.setattr(abortable_nccl, "split_group", lambda *_: Part())
    with pytest.raises(PeerLost, match="lost"):
        transport.split([[0, 1]])
    assert done == ["retired"]


def test_a_closed_group_refers_to_no_group_of_torch(transport: Any) -> None:
    transport._torch_group, transport._is_whole = transport.first, False
    transport._nccl = abortable_nccl.Nccl(0, 2, torch.device("cpu"), transport.first)
    transport.host = SimpleNamespace(close=lambda: None)
    transport.close()
    assert transport._torch_group is transport._nccl._group is None
    transport.close()  # again, after a loss


def test_torch_leaves_aborting_to_this_module(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in abortable_nccl._OFF:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TORCH_NCCL_DUMP_ON_TIMEOUT", "false")
    abortable_nccl.prepare()
    assert {os.environ[name] for name in abortable_nccl._OFF} == {"0"}
    abortable_nccl.prepare()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        ("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "60000"),
        ("TORCH_NCCL_ENABLE_MONITORING", "true"),
        ("TORCH_DISTRIBUTED_DEBUG", "DETAIL"),
    ],
)
def test_variables_that_torch_needs_otherwise_are_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    for each in abortable_nccl._OFF:
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"^{name}={value} cannot be combined with --survive"):
        abortable_nccl.prepare()
    assert os.environ[name] == value
