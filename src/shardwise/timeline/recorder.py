"""Records events of this process; a thread writes them.

An event is a few numbers put on a queue; the thread turns it into text and writes that, a few times
a second, so that a step pays a microsecond per event.
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
    """A row of a timeline, by the number that its thread has in the file.

    Events that overlap on a row of `LANES` go to further rows, numbered from its own on.
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
"""The number of rows that one of `LANES` may take; further overlaps stand on the last of them."""

FURTHER_STEPS = 70
"""The row of the second engine's steps, followed by those of further ones, `WIDEST` in all."""

PERIOD = 0.25
"""Seconds between two writes: the most that a kill loses."""

MANY = 8
"""The number of ranks that are listed one by one."""

PATIENCE = 5.0
"""Seconds that `stop` waits for the last write."""

WAIT = "wait"
"""The category of waits for other ranks; other events have the title of their row as category."""


WAIT_BESIDE = "wait beside"
"""The category of waits on a thread that communicates beside the one that computes."""


class TimelineEvent(NamedTuple):
    """An event with begin and end, in ns of the monotonic clock of this host."""

    row: Row
    name: str
    began: int
    ended: int
    about: Mapping[str, int | str] | None = None
    category: str | None = None


class EventSink(Protocol):
    """Writes events."""

    def write(self, notes: list[TimelineEvent]) -> None:
        """Write events, and how much memory is in use. Raises OSError."""

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

    `on_failure` is called once with the error of a write; nothing is recorded from then on.
    """

    def __init__(self, sink: EventSink, on_failure: Callable[[Exception], None]) -> None:
        self.notes: deque[TimelineEvent] = deque()
        self._sink = sink
        self._on_failure = on_failure
        self._stepped: dict[int, int] = {}
        self._began = time.monotonic_ns()
        self._ends = threading.Event()
        # A daemon, because the end of a process must not wait for a disk.
        self._thread = threading.Thread(target=self._run, name="shardwise-timeline", daemon=True)
        self._thread.start()

    def stepped(self, engine: int, number: int) -> None:
        """Record step `number` of an engine, which began when its step before ended; the first one
        of an engine when another engine's last step ended."""
        now = time.monotonic_ns()
        about = {"step": number, "engine": engine}
        began = self._stepped.get(engine, max(self._stepped.values(), default=self._began))
        self._stepped[engine] = now
        self.notes.append(TimelineEvent(Row.STEPS, f"step {number}", began, now, about))

    def waited(
        self, call: str, since: float, missing: tuple[int, ...], beside: bool = False
    ) -> None:
        """Record a wait in `call` of a thread, the one that computes or one `beside` it, from
        `since` in seconds of the monotonic clock; the ranks `missing` had not come when it
        began."""
        began, now = int(since * 1e9), time.monotonic_ns()
        about = None
        if missing:
            shown = ", ".join(map(str, missing[:MANY]))
            more = f" and {len(missing) - MANY} more" if len(missing) > MANY else ""
            about = {"for": f"rank{'s' * (len(missing) > 1)} {shown}{more}"}
        row, category = (Row.BESIDE, WAIT_BESIDE) if beside else (Row.COMPUTE, WAIT)
        self.notes.append(TimelineEvent(row, f"wait: {call}", began, now, about, category))

    def stop(self) -> None:
        """Write the remaining events, and end the thread."""
        self._ends.set()
        self._thread.join(PATIENCE)

    def _run(self) -> None:
        try:
            while not self._ends.wait(PERIOD):
                self._sink.write(self._taken())
            self._sink.write(self._taken())
            self._sink.close()
        except Exception as error:  # mostly of the disk; only `on_failure` reports it
            # Without removing hooks: a forward of the main thread may be inside one.
            _leave(self)
            self._on_failure(error)

    def _taken(self) -> list[TimelineEvent]:
        # Not until it is empty: other threads append all the time. A deque needs no lock for this.
        return [self.notes.popleft() for _ in range(len(self.notes))]


class Span:
    """A context that is recorded with its name when it ends."""

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
    """A collective in flight, recorded when `done` is called first."""

    __slots__ = ("_about", "_began", "_name", "_recorder")

    def __init__(
        self, recorder: TimelineRecorder, name: str, about: Mapping[str, int | str]
    ) -> None:
        self._recorder: TimelineRecorder | None = recorder
        self._name = name
        self._about = about
        self._began = time.monotonic_ns()

    def done(self) -> None:
        """Record the collective: its result is there."""
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            now = time.monotonic_ns()
            recorder.notes.append(
                TimelineEvent(Row.COMMUNICATION, self._name, self._began, now, self._about)
            )


active: TimelineRecorder | None = None
"""What records at the moment."""

_watchers: WeakSet[Watcher] = WeakSet()
_OFF = nullcontext()


def span(
    name: str, row: Row = Row.COMPUTE, about: Mapping[str, int | str] | None = None
) -> AbstractContextManager[None]:
    """A context that is recorded as `name` on a row; `about` is shown beside it."""
    recorder = active  # read once: the thread that writes may set it to None at any moment
    return _OFF if recorder is None else Span(recorder, name, row, about)


def launched(what: str, buffer: Tensor, bucket: int | None = None) -> Launched | None:
    """A collective over `buffer` that begins now; None where nothing is recorded."""
    recorder = active
    if recorder is None:
        return None
    about: dict[str, int | str] = {} if bucket is None else {"bucket": bucket}
    about |= {"bytes": buffer.nbytes, "dtype": str(buffer.dtype).removeprefix("torch.")}
    return Launched(recorder, what if bucket is None else f"{what} of bucket {bucket}", about)


def watch(watcher: Watcher) -> None:
    """Attach the hooks of `watcher` whenever recording begins; now, where it has begun."""
    _watchers.add(watcher)
    if active is not None:
        watcher.attach()


def unwatch(watcher: Watcher) -> None:
    """Detach the hooks, and do not attach them again."""
    _watchers.discard(watcher)


def start(recorder: TimelineRecorder) -> None:
    """Record with `recorder` from now on."""
    global active
    active = recorder
    for watcher in list(_watchers):
        watcher.attach()


def stop(recorder: TimelineRecorder) -> None:
    """Stop recording with the recorder; what it has is still written."""
    _leave(recorder)
    for watcher in list(_watchers):
        watcher.detach()


def _leave(recorder: TimelineRecorder) -> None:
    global active
    if active is recorder:
        active = None


def _in_forked_child() -> None:
    """Stop recording in a forked child: it has no thread, and its work is not a rank's."""
    global active
    active = None


os.register_at_fork(after_in_child=_in_forked_child)
