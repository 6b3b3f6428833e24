"""The recorder of this process's events, and the thread that writes them.

To record an event is to append a few numbers to a queue, which costs the step a microsecond. A
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
    """A row of a timeline. The value is its thread number in the file.

    Overlapping events on a row of `LANES` go to the rows with the following numbers.
    """

    STEPS = 1
    COMPUTE = 2
    DATA = 3
    CHECKPOINT = 4
    BACKGROUND = 5
    BESIDE = 6
    COMMUNICATION = 10
    TIERS = 40

    @property
    def title(self) -> str:
        """The title of the row."""
        return _TITLES[self]


_TITLES = {
    Row.STEPS: "steps",
    Row.COMPUTE: "compute",
    Row.DATA: "data",
    Row.CHECKPOINT: "checkpoint",
    Row.BACKGROUND: "checkpoint, in the background",
    Row.BESIDE: "waits beside",
    Row.COMMUNICATION: "communication",
    Row.TIERS: "tiers",
}

LANES = (Row.COMMUNICATION, Row.TIERS)
"""Rows whose events may overlap."""

WIDEST = 30
"""Maximum number of rows for one of `LANES`. Further overlapping events go to the last of them."""

FURTHER_STEPS = 70
"""First of the rows for the steps of the second and further engines; `WIDEST` in all."""

PERIOD = 0.25
"""Seconds between two writes. A kill loses the events of at most this time."""

MANY = 8
"""Maximum number of ranks that an event lists by number."""

PATIENCE = 5.0
"""Seconds that `stop` waits for the last write."""

WAIT = "wait"
"""Category of waits for other ranks. Other events have the title of their row as category."""

WAIT_BESIDE = "wait beside"
"""Category of waits on a thread that communicates while another thread computes."""


class TimelineEvent(NamedTuple):
    """An event. Its begin and end are in nanoseconds of this host's monotonic clock."""

    row: Row
    name: str
    began: int
    ended: int
    about: Mapping[str, int | str] | None = None
    category: str | None = None


class EventSink(Protocol):
    """Writes events."""

    def write(self, notes: list[TimelineEvent]) -> None:
        """Write events, and the memory in use. Raises OSError."""

    def close(self) -> None:
        """Finish writing. Raises OSError."""


class Watcher(Protocol):
    """An object with hooks that exist only while a timeline is recorded."""

    def attach(self) -> None:
        """Register the hooks."""

    def detach(self) -> None:
        """Remove the hooks."""


class TimelineRecorder:
    """Queues the events of this process, which a thread writes to `sink`.

    If a write fails, recording stops and `on_failure` is called once with the error.
    """

    def __init__(self, sink: EventSink, on_failure: Callable[[Exception], None]) -> None:
        self.notes: deque[TimelineEvent] = deque()
        self._sink = sink
        self._on_failure = on_failure
        self._stepped: dict[int, int] = {}
        self._began = time.monotonic_ns()
        self._ends = threading.Event()
        # A daemon thread, so that a process can end although its disk hangs.
        self._thread = threading.Thread(target=self._run, name="shardwise-timeline", daemon=True)
        self._thread.start()

    def stepped(self, engine: int, number: int) -> None:
        """Record step `number` of an engine.

        It began when the previous step of this engine ended. For the first step of an engine, it
        began when the latest step of any engine ended.
        """
        now = time.monotonic_ns()
        about = {"step": number, "engine": engine}
        began = self._stepped.get(engine, max(self._stepped.values(), default=self._began))
        self._stepped[engine] = now
        self.notes.append(TimelineEvent(Row.STEPS, f"step {number}", began, now, about))

    def waited(
        self, call: str, since: float, missing: tuple[int, ...], beside: bool = False
    ) -> None:
        """Record a wait in `call`, which began at `since` seconds of the monotonic clock.

        `missing` are the ranks that had not arrived when it began. `beside`: the thread that waited
        only communicates, while another one computes.
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
        """Write the remaining events and end the thread."""
        self._ends.set()
        self._thread.join(PATIENCE)

    def _run(self) -> None:
        try:
            while not self._ends.wait(PERIOD):
                self._sink.write(self._take_queued())
            self._sink.write(self._take_queued())
            self._sink.close()
        except Exception as error:  # usually of the disk; `on_failure` reports it
            # Leave the hooks attached: a forward of the main thread may be running one.
            _leave(self)
            self._on_failure(error)

    def _take_queued(self) -> list[TimelineEvent]:
        # By the length at this moment, and not until it is empty: other threads keep appending.
        # `popleft` and `append` of a deque are atomic, so no lock is needed.
        return [self.notes.popleft() for _ in range(len(self.notes))]


class Span:
    """A context manager that records an event when it ends."""

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
    """A collective in flight, recorded at the first call of `done`."""

    __slots__ = ("_about", "_began", "_name", "_recorder")

    def __init__(
        self, recorder: TimelineRecorder, name: str, about: Mapping[str, int | str]
    ) -> None:
        self._recorder: TimelineRecorder | None = recorder
        self._name = name
        self._about = about
        self._began = time.monotonic_ns()

    def done(self) -> None:
        """Record the collective, whose result has arrived."""
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            now = time.monotonic_ns()
            recorder.notes.append(
                TimelineEvent(Row.COMMUNICATION, self._name, self._began, now, self._about)
            )


active: TimelineRecorder | None = None
"""The recorder of this process, None if no timeline is recorded."""

_watchers: WeakSet[Watcher] = WeakSet()
_OFF = nullcontext()


def span(
    name: str, row: Row = Row.COMPUTE, about: Mapping[str, int | str] | None = None
) -> AbstractContextManager[None]:
    """Return a context manager that records an event `name` on a row, with `about` as details."""
    recorder = active  # read once: the thread that writes may set it to None at any moment
    return _OFF if recorder is None else Span(recorder, name, row, about)


def launched(what: str, buffer: Tensor, bucket: int | None = None) -> Launched | None:
    """Return the event of a collective over `buffer` that begins now, None if not recording."""
    recorder = active
    if recorder is None:
        return None
    about: dict[str, int | str] = {} if bucket is None else {"bucket": bucket}
    about |= {"bytes": buffer.nbytes, "dtype": str(buffer.dtype).removeprefix("torch.")}
    return Launched(recorder, what if bucket is None else f"{what} of bucket {bucket}", about)


def watch(watcher: Watcher) -> None:
    """Attach the hooks of `watcher` when recording begins, or now if it has begun."""
    _watchers.add(watcher)
    if active is not None:
        watcher.attach()


def unwatch(watcher: Watcher) -> None:
    """Do not attach the hooks of `watcher` again."""
    _watchers.discard(watcher)


def start(recorder: TimelineRecorder) -> None:
    """Begin to record with `recorder`."""
    global active
    active = recorder
    for watcher in list(_watchers):
        watcher.attach()


def stop(recorder: TimelineRecorder) -> None:
    """Stop recording. The thread still writes the queued events."""
    _leave(recorder)
    for watcher in list(_watchers):
        watcher.detach()


def _leave(recorder: TimelineRecorder) -> None:
    global active
    if active is recorder:
        active = None


def _stop_in_forked_child() -> None:
    # The child has no writing thread, and its work is not a rank's.
    global active
    active = None


os.register_at_fork(after_in_child=_stop_in_forked_child)
