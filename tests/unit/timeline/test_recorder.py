"""Notes, the lines that they become, and the files that are read again."""

import itertools
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from shardwise.errors import ConfigError
from shardwise.timeline import Row, recorder, span
from shardwise.timeline.encoding import LONGEST, Encoder
from shardwise.timeline.file import PAGE, TimelineFile
from shardwise.timeline.recorder import TimelineEvent, TimelineRecorder
from shardwise.tools.timeline import reading
from shardwise.watch.status_server import CLOCK_ROUNDS, ClockOffset, StatusServer
from shardwise.world import timeline_control as recording


class Kept:
    """A sink that stores the events it receives. Writes fail once `full` is set."""

    def __init__(self) -> None:
        self.notes: list[TimelineEvent] = []
        self.closed = self.full = False

    def write(self, notes: list[TimelineEvent]) -> None:
        if self.full:
            raise OSError(28, "No space left on device")
        self.notes += notes

    def close(self) -> None:
        self.closed = True


class Hooks:
    attached = 0

    def attach(self) -> None:
        self.attached += 1

    def detach(self) -> None:
        self.attached -= 1


def test_nothing_is_made_while_nothing_is_recorded() -> None:
    assert recorder.active is None
    assert span("one") is span("two", Row.DATA)


def test_notes_reach_the_sink_and_hooks_come_and_go() -> None:
    kept, hooks, failures = Kept(), Hooks(), []
    recorder.watch(hooks)
    recording = TimelineRecorder(kept, failures.append)
    recorder.start(recording)
    assert hooks.attached == 1
    with span("outer", about={"bytes": 3}), span("inner", Row.DATA):
        time.sleep(0.001)
    recorder.stop(recording)
    recording.stop()
    inner, outer = kept.notes
    assert (outer.name, outer.row, outer.about) == ("outer", Row.COMPUTE, {"bytes": 3})
    assert outer.began <= inner.began < inner.ended <= outer.ended
    assert inner.ended - inner.began >= 1_000_000
    assert (hooks.attached, kept.closed, failures) == (0, True, [])
    recorder.unwatch(hooks)


def test_a_full_disk_ends_the_timeline_and_nothing_else() -> None:
    kept, failures = Kept(), []
    kept.full = True
    recording = TimelineRecorder(kept, failures.append)
    recorder.start(recording)
    recording.stop()
    assert recorder.active is None
    assert [error.strerror for error in failures] == ["No space left on device"]
    with span("goes on"):
        pass


def note_a_collective() -> None:
    if (sent := recorder.launched("all-reduce", torch.ones(2))) is not None:
        sent.done()


def note_a_span() -> None:
    with span("goes on"):
        pass


@pytest.mark.parametrize("noted", [note_a_span, note_a_collective])
def test_a_timeline_may_end_at_any_moment_of_a_note(
    noted: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before each of its instructions in turn, as the thread that writes does on a full disk."""
    recording = TimelineRecorder(Kept(), lambda error: None)
    kept: list[bool] = []

    def trace(frame: FrameType, event: str, about: Any) -> Any:
        nonlocal left
        frame.f_trace_opcodes = frame.f_code.co_filename == recorder.__file__
        left -= event == "opcode"
        if left == 0:
            recorder._leave(recording)
        return trace

    for moment in itertools.count(1):
        left = moment
        monkeypatch.setattr(recorder, "active", recording)
        before, outer = len(recording.notes), sys.gettrace()
        sys.settrace(trace)
        try:
            noted()
        finally:
            sys.settrace(outer)
        kept.append(len(recording.notes) > before)
        if left > 0:
            break
    recording.stop()
    assert {True, False} == set(kept)


def test_a_forked_process_records_nothing() -> None:
    recording = TimelineRecorder(Kept(), lambda error: None)
    recorder.start(recording)
    try:
        pid = os.fork()
        if pid == 0:
            os._exit(0 if recorder.active is None else 1)
        assert os.waitpid(pid, 0)[1] == 0
    finally:
        recorder.stop(recording)
        recording.stop()


def lines(encoder: Encoder, *notes: TimelineEvent) -> list[dict[str, Any]]:
    return [json.loads(line) for line in encoder.lines(notes)]


def test_rows_are_named_once_and_times_are_those_of_rank_0() -> None:
    encoder = Encoder(3, "node2")
    encoder.ahead = 500_000
    name, order, event = lines(encoder, TimelineEvent(Row.DATA, "next batch", 1_000_000, 1_250_500))
    assert (name["name"], name["args"]) == ("thread_name", {"name": "data"})
    assert (order["name"], order["args"]) == ("thread_sort_index", {"sort_index": 3})
    assert event == {
        "name": "next batch",
        "cat": "data",
        "ph": "X",
        "ts": 500.0,
        "dur": 250.5,
        "pid": 3,
        "tid": 3,
    }
    assert len(lines(encoder, TimelineEvent(Row.DATA, "next batch", 2_000_000, 2_000_500))) == 1


def test_collectives_that_overlap_stand_on_rows_of_their_own() -> None:
    times = [(0, 10), (5, 12), (11, 20), (6, 30), (31, 40)]
    notes = [TimelineEvent(Row.COMMUNICATION, "all-reduce", *pair, {"bytes": 8}) for pair in times]
    found = lines(Encoder(0, "here"), *notes)
    assert [e["tid"] for e in found if e["ph"] == "X"] == [10, 11, 10, 12, 10]
    named = [e["args"]["name"] for e in found if e["name"] == "thread_name"]
    assert named == ["communication", "communication 2", "communication 3"]
    flows = [(e["ph"], e["tid"], e["id"]) for e in found if e.get("cat") == "launch"]
    assert flows[:4] == [("s", 2, "0-1"), ("f", 10, "0-1"), ("s", 2, "0-2"), ("f", 11, "0-2")]


def test_the_steps_of_several_engines_stand_on_a_row_each() -> None:
    """Two that take turns, and a third one after them."""
    kept = Kept()
    recording = TimelineRecorder(kept, lambda error: None)
    for engine, number in [(4, 1), (7, 1), (4, 2), (7, 2), (9, 1)]:
        recording.stepped(engine, number)
    recording.stop()
    one, two, *_, last, third = kept.notes
    assert (two.began, third.began) == (one.ended, last.ended)
    found = lines(Encoder(0, "here"), *kept.notes)
    assert [e["tid"] for e in found if e["ph"] == "X"] == [1, 70, 1, 70, 71]
    named = {e["tid"]: e["args"]["name"] for e in found if e["name"] == "thread_name"}
    assert named == {1: "steps", 70: "steps 2", 71: "steps 3"}
    order = {e["tid"]: e["args"]["sort_index"] for e in found if e["name"] == "thread_sort_index"}
    assert set(order.values()) == {1}  # next to each other, above all other rows
    many = [
        TimelineEvent(Row.STEPS, "step 1", n, n + 1, {"step": 1, "engine": n}) for n in range(99)
    ]
    assert {e["tid"] for e in lines(Encoder(0, ""), *many)} == {1, *range(70, 100)}


def test_every_line_fits_into_a_page() -> None:
    note = TimelineEvent(
        Row.TIERS, "\U0001f600" * 9000, 0, 1, {"of": "\U0001f600" * 9000, "bytes": 1 << 60}
    )
    assert max(map(len, Encoder(1 << 20, "h" * 9000).lines([note]))) < PAGE - 2
    assert len(lines(Encoder(0, ""), note)[-1]["name"]) == LONGEST


class Answering(StatusServer):
    """A rank whose clock is `behind` ns behind, over a link with a latency of some ms."""

    def __init__(self, behind: int) -> None:
        super().__init__(1, 2)
        self._behind = behind
        self._ways = [0.004, 0.001, 0.003, 0.002, 0.004, 0.003, 0.004, 0.002]

    def ask_clock(self, rank: int) -> dict[str, int] | None:
        assert rank == 0
        way = self._ways.pop()
        time.sleep(way)
        clocks = {"monotonic": time.monotonic_ns(), "wall": time.time_ns()}
        time.sleep(way)
        return {name: ns - self._behind for name, ns in clocks.items()}


@pytest.mark.parametrize("which", ["monotonic", "wall"])
def test_a_clock_is_known_to_half_a_round_trip(which: Any) -> None:
    found = Answering(5_000_000_000).clock_offset(0, which)
    assert found is not None
    assert abs(found.ns - 5_000_000_000) <= found.error
    assert found.error >= 1_000_000
    assert StatusServer(0, 2).clock_offset(0, which) == ClockOffset(0, 0)
    assert StatusServer(1, 2).clock_offset(0, which) is None  # it has met nobody


class Late(Answering):
    """On another host, and silent at its first `silent` looks."""

    def __init__(self, behind: int, silent: float) -> None:
        super().__init__(behind)
        self._ways = [0.0] * CLOCK_ROUNDS
        self._silent = silent

    def shares_host(self, rank: int) -> bool:
        return rank == self.rank

    def ask_clock(self, rank: int) -> dict[str, int] | None:
        self._silent -= 1
        return None if self._silent >= 0 else super().ask_clock(rank)


def recorded_by(
    status_server: StatusServer, path: Path, monkeypatch: pytest.MonkeyPatch
) -> list[Any]:
    """The events of a step recorded in three writes."""
    monkeypatch.setattr(recorder, "PERIOD", 0.02)
    recording.start(path, status_server)
    assert recorder.active is not None
    with span("in the first write"):
        pass
    time.sleep(0.1)
    recorder.active.stepped(0, 1)
    recording.stop()
    (written,) = path.parent.glob("*.json")
    return json.loads(written.read_text())


def test_notes_wait_until_rank_0s_clock_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    behind, began = 10**15, time.monotonic_ns()
    events = recorded_by(Late(behind, silent=2), tmp_path / "t.json", monkeypatch)
    times = [event["ts"] for event in events if "ts" in event]
    assert len(times) > 3
    for ts in times:  # counters of memory as well
        assert 0 <= ts * 1000 + behind - began < 10**10
    assert "in the first write" in [event["name"] for event in events]


def test_times_that_fit_nobodys_are_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    events = recorded_by(Late(0, silent=math.inf), tmp_path / "t.json", monkeypatch)
    assert not [event for event in events if "ts" in event]
    assert "rank 0 did not answer with its clock" in capsys.readouterr().err


def test_a_run_of_one_rank_from_start_to_stop(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    recording.start(path, StatusServer(0, 1))
    with span("forward"):
        pass
    recording.stop()
    recording.stop()
    (event,) = (one for one in reading.read([path]) if one["ph"] == "X")
    assert event["name"] == "forward"
    assert {one["name"] for one in reading.read([path]) if one["ph"] == "C"} == {"memory (MB)"}
    status_server = StatusServer(0, 1)
    for name in ("first", "second"):
        recording.start(path, status_server)
        with span(name):
            pass
        recording.stop()
    assert [one["name"] for one in reading.read([path]) if one["ph"] == "X"] == ["first", "second"]
    with pytest.raises(ConfigError, match="exists and is no timeline of Shardwise"):
        recording.start(Path(__file__), StatusServer(0, 1))
    assert recorder.active is None


class TestReading:
    def written(self, path: Path, run: str, name: str) -> Path:
        file = TimelineFile(path, run, 0, {})
        file.write([json.dumps({"name": name, "ph": "X"})])
        return path

    def names(self, *paths: Path) -> list[str]:
        return [event["name"] for event in reading.read(paths) if event["ph"] == "X"]

    def test_files_of_other_hosts_are_found_and_merged(self, tmp_path: Path) -> None:
        path = self.written(tmp_path / "t.json", "a", "here")
        self.written(tmp_path / "t.node2.json", "a", "there")
        self.written(tmp_path / "t.node3.json", "b", "of another run")
        (tmp_path / "t.notes.json").write_text("{not JSON")
        assert self.names(path) == ["here", "there"]
        whole = tmp_path / "whole.json"
        reading.merge(reading.read([path]), whole)
        assert self.names(whole) == ["here", "there"]
        alone = shutil.move(whole, tmp_path / "elsewhere.json")
        assert self.names(alone) == ["here", "there"]

    def test_files_of_two_runs_are_refused(self, tmp_path: Path) -> None:
        one = self.written(tmp_path / "1.json", "a", "x")
        two = self.written(tmp_path / "2.json", "b", "x")
        with pytest.raises(ConfigError, match="belong to different runs"):
            reading.read([one, two])

    @pytest.mark.parametrize(
        "text",
        [
            '[\n%s,\n{"name": "x", "ph": "X"},\n{"name": "y", "ph": "X"}\n',
            '[\n%s,\n{"name": "x", "ph": "X"},\n{"name": "y", "ph": "X"},\n{"na',
            '{"traceEvents": [{"name": "x", "ph": "X"}, %s, {"name": "y", "ph": "X"}]}',
        ],
    )
    def test_what_other_tools_leave(self, tmp_path: Path, text: str) -> None:
        path = tmp_path / "t.json"
        path.write_text(text % '{"name": "shardwise timeline", "ph": "M", "args": {"run": "a"}}')
        assert self.names(path) == ["x", "y"]

    @pytest.mark.parametrize(
        "text",
        [
            '{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "aten::add", "pid": "7"}]}',
            '[{"name": "step 1", "ph": "X", "cat": "steps", "pid": 0, "ts": 0, "dur": 1}]',
            '[{"name": "shardwise timeline", "ph": "M"}]',
            "[]",
        ],
    )
    def test_what_another_tool_wrote(self, tmp_path: Path, text: str) -> None:
        path = tmp_path / "t.json"
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"t\.json is not a timeline of shardwise"):
            reading.read([path])
        assert self.names(self.written(tmp_path / "t", "a", "ours")) == ["ours"]

    @pytest.mark.parametrize("text", ["", "{}", "[1]", "[[", "\xff"])
    def test_what_is_no_timeline(self, tmp_path: Path, text: str) -> None:
        path = tmp_path / "t.json"
        path.write_text(text, encoding="latin-1")
        with pytest.raises(ConfigError, match=r"t\.json"):
            reading.read([path])
