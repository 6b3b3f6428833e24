"""Starts and stops the timeline of this process: its file, and the clock of its times."""

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
"""Seconds between two readings of rank 0's clock. Quartz drifts by some 10 us per second."""

HELD = 200_000
"""Most events to hold until rank 0's clock is known: some 50 MB."""

AT_ONCE = 32
"""Events that are encoded without a pause: a tenth of a millisecond."""


def start(path: Path, status_server: StatusServer) -> None:
    """Record into `path`; on other hosts than rank 0's into a file with the host's name added.

    Raises ConfigError if the file cannot be written.
    """
    # One recording per process: starting another one ends the first.
    stop()
    at_home = status_server.shares_host(0)
    host = socket.gethostname()
    # A shared folder must not have two hosts writing one file.
    path = path if at_home else sibling(path, host)
    encoder = Encoder(status_server.rank, host)
    try:
        # Absolute, because the script may change its working directory later.
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
    """Write the remaining events and stop recording; does nothing if nothing is recorded."""
    running = recorder.active
    if running is not None:
        recorder.stop(running)
        running.stop()


def where(path: Path, status_server: StatusServer) -> str:
    """Return the line that shows the user the path of the timeline."""
    line = f"timeline in {path}: open it in ui.perfetto.dev, or shardwise timeline {path}"
    if status_server.hosts > 1:
        line += (
            f"; each other host writes {sibling(path, 'HOST')}: shardwise timeline FILES --merge "
            "WHOLE.json combines them"
        )
    return line


class _ToFile:
    """Writes events and memory in use into a file, in the time of rank 0's clock.

    `distant` asks for rank 0's clock; None if rank 0 is on this host and the clock is the same.
    Until the clock is known, events are held, because their times could not be compared with times
    of other hosts.
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
        """Write events, and the memory in use. Raises OSError."""
        first = self._ahead is None
        self._measure()
        # Events from before the clock was known are written first.
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
            # A new clock offset applies from the end of a step: inside one, an event could
            # otherwise end after the event that contains it.
            if note.row is Row.STEPS:
                self._encoder.ahead = self._ahead
            if number % AT_ONCE == 0:
                time.sleep(0)  # yield the interpreter lock to the training thread
        lines.append(self._encoder.counter(time.monotonic_ns(), memory_in_use()))
        self._file.write(lines)

    def close(self) -> None:
        """Close the file. Raises OSError, also if events were held until the end."""
        self._file.close()
        if self._held:
            raise _unanswered()

    def _measure(self) -> None:
        """Read rank 0's clock: at each write until it is known, then every MEASURED_EVERY."""
        now = time.monotonic()
        if self._distant is None:
            return
        if self._ahead is not None and now - self._measured < MEASURED_EVERY:
            return
        self._measured = now
        found = self._distant.clock_offset(0, "monotonic")
        # If rank 0 does not answer, keep the last offset.
        if found is not None:
            self._ahead = found.ns


def _unanswered() -> OSError:
    return TimeoutError("rank 0 did not answer with its clock, which the times in the file need")
