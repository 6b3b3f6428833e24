"""Starts and stops the timeline of this process: which file, whose clock."""

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
"""Seconds between two looks at rank 0's clock: quartz drifts by some 10 microseconds a second."""

HELD = 200_000
"""Notes that are held at most until rank 0's clock is known: some 50 MB."""

AT_ONCE = 32
"""Notes that are written down in one go: a tenth of a millisecond."""


def start(path: Path, status_server: StatusServer) -> None:
    """Record into `path`, on a host that is not rank 0's into one beside it with the host's name.

    Raises ConfigError where the file cannot be written.
    """
    stop()
    at_home = status_server.shares_host(0)
    host = socket.gethostname()
    path = path if at_home else sibling(path, host)
    encoder = Encoder(status_server.rank, host)
    try:
        # Where it is, whatever becomes of the working directory.
        file = TimelineFile(
            path.resolve(), status_server.run, status_server.rank, _about(status_server)
        )
        file.write(encoder.opening())
    except OSError as error:
        why = error.strerror or error
        raise ConfigError(f"The timeline {path} cannot be written: {why}.") from error
    sink = _ToFile(file, encoder, None if at_home else status_server)
    recorder.start(TimelineRecorder(sink, lambda error: _give_up(status_server.rank, path, error)))


def stop() -> None:
    """Write what is left, and record no longer; harmless where nothing is recorded."""
    running = recorder.active
    if running is not None:
        recorder.stop(running)
        running.stop()


def where(path: Path, status_server: StatusServer) -> str:
    """What a user is told of it, in one line."""
    line = f"timeline in {path}: open it in ui.perfetto.dev, or shardwise timeline {path}"
    if status_server.hosts > 1:
        line += (
            f"; each other host writes {sibling(path, 'HOST')}, and shardwise timeline with the "
            "files of all, and --merge WHOLE.json, makes one of them"
        )
    return line


def _about(status_server: StatusServer) -> dict[str, object]:
    return {"ranks": status_server.size, "began": time.strftime("%Y-%m-%dT%H:%M:%S%z")}


def _give_up(rank: int, path: Path, error: Exception) -> None:
    why = getattr(error, "strerror", None) or error
    line = f"shardwise: rank {rank} records no timeline in {path} any more: {why}."
    print(line, file=sys.stderr, flush=True)


class _ToFile:
    """Notes and memory in use, as lines of a file in rank 0's time.

    `distant` is asked for rank 0's clock, None where it is the clock of this host. Until it has
    answered, notes are held: times of this host would be in order with nobody's.
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
        """Write them, and how much memory is in use. Raises OSError."""
        first = self._ahead is None
        self._measure()
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
            if note.row is Row.STEPS:  # in between, what stands inside another would stick out
                self._encoder.ahead = self._ahead
            if number % AT_ONCE == 0:
                time.sleep(0)  # the interpreter is for the thread that trains
        lines.append(self._encoder.counter(time.monotonic_ns(), memory_in_use()))
        self._file.write(lines)

    def close(self) -> None:
        """Let the file be, whole. Raises OSError, also where notes are held to the end."""
        self._file.close()
        if self._held:
            raise _unanswered()

    def _measure(self) -> None:
        """Look at rank 0's clock: until it was seen once at every write, then now and then."""
        now = time.monotonic()
        if self._distant is None:
            return
        if self._ahead is not None and now - self._measured < MEASURED_EVERY:
            return
        self._measured = now
        found = self._distant.clock_offset(0, "monotonic")
        if found is not None:
            self._ahead = found.ns


def _unanswered() -> OSError:
    return TimeoutError("rank 0 has not answered what its clock shows, whose time is in the file")
