"""What is going on in this process: noted where it happens, written by a thread.

A note is a few numbers put on a queue; turning it into text and writing that is the thread's work,
a few times a second, so that a step pays a microsecond per event.
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
"""Rows of events that overlap each other."""

WIDEST = 30
"""Rows that one of `LANES` may take; what overlaps more stands on the last of them."""

FURTHER_STEPS = 70
"""The row of the second engine's steps, on which those of further ones follow, `WIDEST` in all."""

PERIOD = 0.25
"""Seconds between two writes: what a kill takes away at most."""

MANY = 8
"""Ranks that are listed one by one."""

PATIENCE = 5.0
"""Seconds that the last write gets."""

WAIT = "wait"
"""The category of what a rank waits for others; else a category is the title of the row."""


WAIT_BESIDE = "wait beside"
"""The category of what a thread waits for that communicates beside the one that computes."""


class TimelineEvent(NamedTuple):
    """An event with begin and end, in ns of the monotonic clock of this host."""

    row: Row
    name: str
    began: int
    ended: int
    about: Mapping[str, int | str] | None = None
    category: str | None = None


class NoteSink(Protocol):
    """Writes notes."""

    def write(self, notes: list[TimelineEvent]) -> None:
        """Write notes, and how much memory is in use. Raises OSError."""

    def close(self) -> None:
        """Finish writing. Raises OSError."""


class Watcher(Protocol):
    """An object with hooks that exist only while a timeline is recorded."""

    def attach(self) -> None:
        """Register the hooks."""

    def detach(self) -> None:
        """Remove the hooks."""


class TimelineRecorder:
    """Queues the notes of this process, which a thread writes to `sink`.

    `on_failure` is called once with the error of a write; nothing is recorded from then on.
    """

    def __init__(self, sink: NoteSink, on_failure: Callable[[Exception], None]) -> None:
        self.notes: deque[TimelineEvent] = deque()
        self._sink = sink
        self._on_failure = on_failure
        self._stepped: dict[int, int] = {}
        self._began = time.monotonic_ns()
        self._ends = threading.Event()
        # A daemon, since the end of a process must not wait for a disk.
        self._thread = threading.Thread(target=self._run, name="shardwise-timeline", daemon=True)
        self._thread.start()

    def stepped(self, engine: int, number: int) -> None:
        """Step `number` of an engine is over; it began when the one before was over, an engine's
        first one when another engine's last."""
        now = time.monotonic_ns()
        about = {"step": number, "engine": engine}
        began = self._stepped.get(engine, max(self._stepped.values(), default=self._began))
        self._stepped[engine] = now
        self.notes.append(TimelineEvent(Row.STEPS, f"step {number}", began, now, about))

    def waited(
        self, call: str, since: float, missing: tuple[int, ...], beside: bool = False
    ) -> None:
        """A thread, the one that computes or one `beside` it, has waited in `call`, `since` seconds
        of the monotonic clock; the ranks `missing` had not come when it began."""
        began, now = int(since * 1e9), time.monotonic_ns()
        about = {"for": _listed(missing)} if missing else None
        row, category = (Row.BESIDE, WAIT_BESIDE) if beside else (Row.COMPUTE, WAIT)
        self.notes.append(TimelineEvent(row, f"wait: {call}", began, now, about, category))

    def stop(self) -> None:
        """Write what is left, and end."""
        self._ends.set()
        self._thread.join(PATIENCE)

    def _run(self) -> None:
        try:
            while not self._ends.wait(PERIOD):
                self._sink.write(self._taken())
            self._sink.write(self._taken())
            self._sink.close()
        except Exception as error:  # mostly a disk's; nobody else would hear of it
            _leave(self)  # hooks stay, and do nothing: a forward may be going through them
            self._on_failure(error)

    def _taken(self) -> list[TimelineEvent]:
        return [self.notes.popleft() for _ in range(len(self.notes))]


def _listed(ranks: tuple[int, ...]) -> str:
    """Ranks in words; of many the first."""
    shown = ", ".join(map(str, ranks[:MANY]))
    more = f" and {len(ranks) - MANY} more" if len(ranks) > MANY else ""
    return f"rank{'s' * (len(ranks) > 1)} {shown}{more}"


class Span:
    """A context that is noted with its name when it ends."""

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
    """A collective on its way, noted when it is `done` for the first time."""

    __slots__ = ("_about", "_began", "_name", "_recorder")

    def __init__(
        self, recorder: TimelineRecorder, name: str, about: Mapping[str, int | str]
    ) -> None:
        self._recorder: TimelineRecorder | None = recorder
        self._name = name
        self._about = about
        self._began = time.monotonic_ns()

    def done(self) -> None:
        """Its result is there."""
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
    """A context that is noted as `name` on a row; `about` is shown beside it."""
    recorder = active  # read once: the thread that writes may end it at any moment
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
    """Let it hook on whenever recording begins; now, where it has begun."""
    _watchers.add(watcher)
    if active is not None:
        watcher.attach()


def unwatch(watcher: Watcher) -> None:
    """It hooks on no more."""
    _watchers.discard(watcher)


def start(recorder: TimelineRecorder) -> None:
    """Record by `recorder` from now on."""
    global active
    active = recorder
    for watcher in list(_watchers):
        watcher.attach()


def stop(recorder: TimelineRecorder) -> None:
    """Record by it no longer; what it has is still written."""
    _leave(recorder)
    for watcher in list(_watchers):
        watcher.detach()


def _leave(recorder: TimelineRecorder) -> None:
    global active
    if active is recorder:
        active = None


def _in_forked_child() -> None:
    """The thread is not in it, and its work is not a rank's."""
    global active
    active = None


os.register_at_fork(after_in_child=_in_forked_child)
