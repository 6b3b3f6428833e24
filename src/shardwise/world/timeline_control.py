"""Starts and stops this process's timeline, and converts its times to rank 0's clock."""

from __future__ import annotations

import socket
import sys
import time
from pathlib import Path

from shardwise.errors import ConfigError
from shardwise.timeline import Row, recorder
from shardwise.timeline.encoding import Encoder, memory_in_use
from shardwise.timeline.file import TimelineFile, sibling
from shardwise.timeline.recorder import TimelineEvent, TimelineRecorder
from shardwise.watch.status_server import StatusServer

MEASURED_EVERY = 30.0
"""Seconds between two readings of rank 0's clock. Quartz clocks drift by about 10 us per second."""

HELD = 200_000
"""Maximum number of events to buffer until rank 0's clock is known: about 50 MB."""

AT_ONCE = 32
"""Number of events to encode without a pause, which takes about 0.1 ms."""


def start(path: Path, status_server: StatusServer) -> None:
    """Record to `path`. On hosts other than rank 0's, add the host's name to the file name.

    Raises ConfigError if the file cannot be written.
    """
    # A process has at most one recording, so stop the previous one.
    stop()
    at_home = status_server.shares_host(0)
    host = socket.gethostname()
    # In a shared folder, two hosts must not write to the same file.
    path = path if at_home else sibling(path, host)
    encoder = Encoder(status_server.rank, host)
    try:
        # Use an absolute path, because the script may change its working directory later.
        began = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        about: dict[str, object] = {"ranks": status_server.size, "began": began}
        file = TimelineFile(path.resolve(), status_server.run, status_server.rank, about)
        file.write(encoder.opening())
    except OSError as error:
        why = error.strerror or error
        raise ConfigError(f"The timeline {path} cannot be written: {why}.") from error
    sink = _ToFile(file, encoder, None if at_home else status_server)

    def say_why(error: Exception) -> None:
        why = getattr(error, "strerror", None) or error
        rank = status_server.rank
        line = f"shardwise: rank {rank} has stopped recording a timeline in {path}: {why}."
        print(line, file=sys.stderr, flush=True)

    recorder.start(TimelineRecorder(sink, say_why))


def stop() -> None:
    """Write the remaining events and stop recording. Does nothing if recording is off."""
    running = recorder.active
    if running is not None:
        recorder.stop(running)
        running.stop()


def where(path: Path, status_server: StatusServer) -> str:
    """Return the message that tells the user the path of the timeline."""
    line = f"timeline in {path}: open it in ui.perfetto.dev, or shardwise timeline {path}"
    if status_server.hosts > 1:
        line += (
            f"; each other host writes {sibling(path, 'HOST')}: shardwise timeline FILES --merge "
            "WHOLE.json combines them"
        )
    return line


class _ToFile:
    """Writes events and memory use to a file, with times on rank 0's clock.

    `distant` requests the time of rank 0's clock. It is None if rank 0 is on this host, where the
    clock is the same. Until the clock offset is known, events are buffered, because their times
    could not be compared with those of other hosts.
    """

    def __init__(self, file: TimelineFile, encoder: Encoder, distant: StatusServer | None) -> None:
        self._file = file
        self._encoder = encoder
        self._distant = distant
        self._held: list[TimelineEvent] = []
        self._ahead: int | None = 0 if distant is None else None
        self._measured = 0.0
        self._measure()
        encoder.ahead = self._ahead or 0

    def write(self, notes: list[TimelineEvent]) -> None:
        """Write events and the current memory use. Raises OSError if that fails."""
        first = self._ahead is None
        self._measure()
        # First write the events from before the clock was known.
        self._held += notes
        if self._ahead is None:
            if len(self._held) > HELD:
                raise _unanswered()
            return
        if first:
            self._encoder.ahead = self._ahead
        notes, self._held = self._held, []
        lines: list[str] = []
        for number, note in enumerate(notes):
            lines += self._encoder.lines([note])
            # Apply a new clock offset only from the end of a step. Within a step, an event could
            # otherwise end after the event that contains it.
            if note.row is Row.STEPS:
                self._encoder.ahead = self._ahead
            if number % AT_ONCE == 0:
                time.sleep(0)  # yield the interpreter lock to the training thread
        lines.append(self._encoder.counter(time.monotonic_ns(), memory_in_use()))
        self._file.write(lines)

    def close(self) -> None:
        """Close the file. Raises OSError if that fails, or if events are still buffered."""
        self._file.close()
        if self._held:
            raise _unanswered()

    def _measure(self) -> None:
        """Read rank 0's clock at each write until it is known, then every MEASURED_EVERY s."""
        now = time.monotonic()
        if self._distant is None:
            return
        if self._ahead is not None and now - self._measured < MEASURED_EVERY:
            return
        self._measured = now
        found = self._distant.clock_offset(0, "monotonic")
        # Keep the last offset if rank 0 does not answer.
        if found is not None:
            self._ahead = found.ns


def _unanswered() -> OSError:
    return TimeoutError("rank 0 did not answer with its clock, which the times in the file need")
