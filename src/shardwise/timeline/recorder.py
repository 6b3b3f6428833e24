"""Records this process's events, and writes them in a separate thread.

Recording an event appends a few numbers to a queue, which delays the step by about a microsecond. A
thread encodes and writes the queue a few times per second.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple, Protocol
from weakref import WeakSet

if TYPE_CHECKING:
    from torch import Tensor


class Row(IntEnum):
    """A row of a timeline. Each member's value is its thread number in the file.

    Events that overlap on a row in `LANES` move to the next thread numbers.
    """

    STEPS = 1
    COMPUTE = 2
    DATA = 3
    CHECKPOINT = 4
    BACKGROUND = 5
    BESIDE = 6
    ATTENTION = 7
    COMMUNICATION = 10
    TIERS = 40

    @property
    def title(self) -> str:
        return _TITLES[self]


_TITLES = {
    Row.STEPS: "steps",
    Row.COMPUTE: "compute",
    Row.DATA: "data",
    Row.CHECKPOINT: "checkpoint",
    Row.BACKGROUND: "checkpoint, in the background",
    Row.BESIDE: "waits beside",
    Row.ATTENTION: "attention exchanges",
    Row.COMMUNICATION: "communication",
    Row.TIERS: "tiers",
}

LANES = (Row.COMMUNICATION, Row.TIERS)
"""Rows whose events may overlap."""

WIDEST = 30
"""Maximum number of lanes for a row in `LANES`. Further overlapping events share the last lane."""

FURTHER_STEPS = 70
"""First row for the steps of the second and further engines.

There are at most `WIDEST` such rows.
"""

PERIOD = 0.25
"""Seconds between two writes. A kill loses at most the events of this period."""

MANY = 8
"""Maximum number of ranks that an event lists individually."""

PATIENCE = 5.0
"""Seconds that `stop` waits for the last write."""

WAIT = "wait"
"""Category of waits for other ranks. For other events, the category is the title of their row."""

WAIT_BESIDE = "wait beside"
"""Category of waits on a thread that communicates while another thread computes."""


class TimelineEvent(NamedTuple):
    """An event. `began` and `ended` are times in nanoseconds on this host's monotonic clock."""

    row: Row
    name: str
    began: int
    ended: int
    about: Mapping[str, int | str] | None = None
    category: str | None = None


class EventSink(Protocol):
    """Receives events and writes them."""

    def write(self, notes: list[TimelineEvent]) -> None:
        """Write events and the memory in use. Raises OSError if writing fails."""

    def close(self) -> None:
        """Finish writing. Raises OSError if writing fails."""


class Watcher(Protocol):
    """An object whose hooks are registered only while a timeline is recorded."""

    def attach(self) -> None:
        """Register the hooks."""

    def detach(self) -> None:
        """Remove the hooks."""


class TimelineRecorder:
    """Queues this process's events. A thread writes them to `sink`.

    If a write fails, recording stops and `on_failure` is called once with the error.
    """

    def __init__(self, sink: EventSink, on_failure: Callable[[Exception], None]) -> None:
        self.notes: deque[TimelineEvent] = deque()
        self._sink = sink
        self._on_failure = on_failure
        self._stepped: dict[int, int] = {}
        self._began = time.monotonic_ns()
        self._ends = threading.Event()
        # A daemon thread, so that the process can exit even if its disk hangs.
        self._thread = threading.Thread(target=self._run, name="shardwise-timeline", daemon=True)
        self._thread.start()

    def stepped(self, engine: int, number: int) -> None:
        """Record that step `number` of an engine has ended.

        The step's recorded start is the end of the engine's previous step. If it is the engine's
        first step, its start is the end of the latest step of any engine.
        """
        now = time.monotonic_ns()
        about = {"step": number, "engine": engine}
        began = self._stepped.get(engine, max(self._stepped.values(), default=self._began))
        self._stepped[engine] = now
        self.notes.append(TimelineEvent(Row.STEPS, f"step {number}", began, now, about))

    def waited(
        self, call: str, since: float, missing: tuple[int, ...], beside: bool = False
    ) -> None:
        """Record a wait in `call` that began at `since` (monotonic clock, in seconds).

        `missing` lists the ranks that had not arrived when the wait began. `beside` is True if the
        thread that waits only communicates while another thread computes.
        """
        began, now = int(since * 1e9), time.monotonic_ns()
        about = None
        if missing:
            shown = ", ".join(map(str, missing[:MANY]))
            more = f" and {len(missing) - MANY} more" if len(missing) > MANY else ""
            about = {"for": f"rank{'s' * (len(missing) > 1)} {shown}{more}"}
        row, category = (Row.BESIDE, WAIT_BESIDE) if beside else (Row.COMPUTE, WAIT)
        self.notes.append(TimelineEvent(row, f"wait: {call}", began, now, about, category))

    def stop(self) -> None:
        """Write the remaining events and stop the thread."""
        self._ends.set()
        self._thread.join(PATIENCE)

    def _run(self) -> None:
        try:
            while not self._ends.wait(PERIOD):
                self._sink.write(self._take_queued())
            self._sink.write(self._take_queued())
            self._sink.close()
        except Exception as error:  # usually a disk error, which `on_failure` reports
            # Leave the hooks attached, because a forward pass in the main thread may be running
            # one.
            _leave(self)
            self._on_failure(error)

    def _take_queued(self) -> list[TimelineEvent]:
        # Take as many as there are now, and do not wait until the queue is empty, because other
        # threads keep appending. `popleft` and `append` of a deque are atomic, so no lock is
        # needed.
        return [self.notes.popleft() for _ in range(len(self.notes))]


class Span:
    """A context manager that records an event when it exits."""

    __slots__ = ("_about", "_began", "_name", "_recorder", "_row")

    def __init__(
        self, recorder: TimelineRecorder, name: str, row: Row, about: Mapping[str, int | str] | None
    ) -> None:
        self._recorder = recorder
        self._name = name
        self._row = row
        self._about = about

    def __enter__(self) -> None:
        self._began = time.monotonic_ns()

    def __exit__(self, *_: object) -> None:
        note = TimelineEvent(self._row, self._name, self._began, time.monotonic_ns(), self._about)
        self._recorder.notes.append(note)


class Launched:
    """A collective in flight. The first call to `done` records it."""

    __slots__ = ("_about", "_began", "_name", "_recorder", "_row")

    def __init__(
        self, recorder: TimelineRecorder, name: str, row: Row, about: Mapping[str, int | str]
    ) -> None:
        self._recorder: TimelineRecorder | None = recorder
        self._name = name
        self._row = row
        self._about = about
        self._began = time.monotonic_ns()

    def done(self) -> None:
        """Record the collective. Must be called when the result has arrived."""
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            now = time.monotonic_ns()
            recorder.notes.append(
                TimelineEvent(self._row, self._name, self._began, now, self._about)
            )


active: TimelineRecorder | None = None
"""The recorder of this process, or None if no timeline is recorded."""

_watchers: WeakSet[Watcher] = WeakSet()
_OFF = nullcontext()


def span(
    name: str, row: Row = Row.COMPUTE, about: Mapping[str, int | str] | None = None
) -> AbstractContextManager[None]:
    """Return a context manager that records an event `name` on a row. `about` holds details."""
    recorder = active  # read once, because the writing thread may set it to None at any moment
    return _OFF if recorder is None else Span(recorder, name, row, about)


def launched(
    what: str, buffer: Tensor, bucket: int | None = None, row: Row = Row.COMMUNICATION
) -> Launched | None:
    """Start the event of a collective over `buffer`. Returns None if no timeline is recorded."""
    recorder = active
    if recorder is None:
        return None
    about: dict[str, int | str] = {} if bucket is None else {"bucket": bucket}
    about |= {"bytes": buffer.nbytes, "dtype": str(buffer.dtype).removeprefix("torch.")}
    name = what if bucket is None else f"{what} of bucket {bucket}"
    return Launched(recorder, name, row, about)


def watch(watcher: Watcher) -> None:
    """Attach the hooks of `watcher` whenever recording starts, and now if it already has."""
    _watchers.add(watcher)
    if active is not None:
        watcher.attach()


def unwatch(watcher: Watcher) -> None:
    """Stop attaching the hooks of `watcher` when recording starts. Does not detach them now."""
    _watchers.discard(watcher)


def start(recorder: TimelineRecorder) -> None:
    """Start recording with `recorder`, and attach all watchers' hooks."""
    global active
    active = recorder
    for watcher in list(_watchers):
        watcher.attach()


def stop(recorder: TimelineRecorder) -> None:
    """Stop recording, and detach all hooks. The thread still writes the queued events."""
    _leave(recorder)
    for watcher in list(_watchers):
        watcher.detach()


def _leave(recorder: TimelineRecorder) -> None:
    global active
    if active is recorder:
        active = None


def _stop_in_forked_child() -> None:
    # The child has no writing thread, and its work does not belong to a rank.
    global active
    active = None


os.register_at_fork(after_in_child=_stop_in_forked_child)
