"""One rank as a process of this host: starts it, reads what it writes, ends it."""

import os
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from shardwise.errors import LaunchError
from shardwise.launch import orphan_reaper
from shardwise.launch.console import STDERR, STDOUT
from shardwise.launch.failure_report import ExitStatus
from shardwise.launch.worker_output import LIVE

READ_SIZE = 2**16
MOST_READS = 64
"""So many reads empty any pipe; what still comes then is written by someone who goes on."""


@dataclass(frozen=True, kw_only=True)
class WorkerStreams:
    """What the standard streams of a rank are connected to.

    `piped`: its output comes through us. `drawn`: which of streams 1 and 2 are a terminal, of
    `window` rows and columns where known. `reads`: it has our standard input.
    """

    piped: bool = True
    drawn: tuple[int, ...] = ()
    window: tuple[int, int] | None = None
    reads: bool = False


class Process(Protocol):
    """A child process that leads a session, and so a process group, of its own."""

    pid: int
    returncode: int | None


Streams = tuple[int | None, int | None, int | None]
"""Descriptors for the standard input, output and error of a process. None keeps ours, and
`subprocess.DEVNULL` is an empty input."""

Begin = Callable[[Mapping[str, str], Sequence[int], Streams], Process]
"""Starts a process with these variables, inherited descriptors and standard streams."""


def program(words: Sequence[str]) -> Begin:
    """Return a starter of the program `words`. It raises LaunchError if the system refuses."""

    def begin(environ: Mapping[str, str], pass_fds: Sequence[int], streams: Streams) -> Process:
        stdin, stdout, stderr = streams
        try:
            return subprocess.Popen(
                words,
                env=environ,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                pass_fds=pass_fds,
                start_new_session=True,
            )
        except OSError as error:
            raise LaunchError(f"{words[0]} cannot be started: {error.strerror}.") from None

    return begin


class OutputSource:
    """The end of a pipe or terminal that a rank writes to; `open` while more may come."""

    def __init__(self, fd: int, take: Callable[[bytes], None]) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self.open = True
        self._take = take

    def read(self) -> bool:
        """Pass on what has come; False at the end of the stream."""
        return self._read() != b""

    def drain(self) -> None:
        """Pass on what the ended rank has written; do not wait for others that hold the pipe."""
        for _ in range(MOST_READS):
            if not self._read():
                break
        self._take(b"")
        self.open = False
        os.close(self.fd)

    def _read(self) -> bytes | None:
        """What was passed on; None when there is nothing now."""
        try:
            data = os.read(self.fd, READ_SIZE)
        except BlockingIOError:
            return None
        except OSError:  # the other end of a terminal was closed
            return b""
        if data:
            self._take(data)
        return data


class Worker:
    """A rank that was started in a process group of its own.

    What it writes goes to `hear`, with the number of the stream; b"" ends a stream. `end` is None
    while it runs, `peak` its largest resident set in bytes once it has ended.
    """

    def __init__(self, rank: int, hear: Callable[[int, bytes], None]) -> None:
        self.rank = rank
        self.sources: list[OutputSource] = []
        self.end: ExitStatus | None = None
        self.peak = 0
        self._hear = hear
        self._theirs: dict[int, int] = {}
        self._terminal: int | None = None
        self._gone = False

    def start(
        self,
        begin: Begin,
        environ: Mapping[str, str],
        pass_fds: Sequence[int],
        outlet: WorkerStreams,
    ) -> None:
        """Start the process. Raises LaunchError when the system refuses."""
        started = False
        try:
            if outlet.piped:
                self._connect(outlet)
            stdin = None if outlet.reads else subprocess.DEVNULL
            streams = stdin, self._theirs.get(STDOUT), self._theirs.get(STDERR)
            self._process = begin(environ, pass_fds, streams)
            started = True
        except OSError as error:  # no pipe, or no terminal
            raise LaunchError(f"Rank {self.rank} cannot be started: {error.strerror}.") from None
        finally:
            # The rank has copies. With ours open, a pipe would not end when the rank ends.
            for fd in set(self._theirs.values()):
                os.close(fd)
            if not started:
                for source in self.sources:
                    os.close(source.fd)
                self.sources = []

    @property
    def group(self) -> int:
        """The process group of the rank: the process itself and all that it starts."""
        return self._process.pid

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the whole process group."""
        if not self.is_gone():
            orphan_reaper.signal_group(self.group, number)

    def send_to_process(self, number: signal.Signals) -> None:
        """Send a signal to the process, and not to those that it has started."""
        if self.end is None:  # not reaped, so the number is still that of this process
            os.kill(self._process.pid, number)

    def is_gone(self) -> bool:
        """Whether nothing is left of the process group. From then on its number may be that of
        others, who are left alone."""
        if self.end is not None and not self._gone:
            self._gone = not orphan_reaper.signal_group(self.group, 0)
        return self._gone

    def reap(self, *, stopped: bool) -> bool:
        """Note the end of the process, where it has ended since; whether it has."""
        # Not Popen.wait: only wait4 tells the peak of the memory, which explains a SIGKILL.
        pid, status, usage = os.wait4(self._process.pid, os.WNOHANG)
        if pid == 0:
            return False
        code = os.waitstatus_to_exitcode(status)
        self._process.returncode = code
        self.peak = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        self.end = ExitStatus(rank=self.rank, code=code, time=time.time(), stopped=stopped)
        return True

    def resize(self, window: tuple[int, int]) -> None:
        """Pass on the new rows and columns of the terminal to a rank that draws live."""
        if self._terminal is not None and self.end is None:
            termios.tcsetwinsize(self._terminal, window)
            self.send_signal(signal.SIGWINCH)

    def _connect(self, outlet: WorkerStreams) -> None:
        """Open what the process will write to; all that it draws goes to one terminal."""
        if outlet.drawn:
            self._terminal, slave = _open_terminal(outlet.window)
            self._theirs |= dict.fromkeys(outlet.drawn, slave)
            self.sources.append(OutputSource(self._terminal, partial(self._hear, LIVE)))
        for fd in {STDOUT, STDERR} - set(outlet.drawn):
            ours, self._theirs[fd] = os.pipe()
            self.sources.append(OutputSource(ours, partial(self._hear, fd)))


def _open_terminal(window: tuple[int, int] | None) -> tuple[int, int]:
    """A pseudo-terminal that passes bytes as they are: our own terminal translates newlines."""
    ours, theirs = os.openpty()
    attributes = termios.tcgetattr(theirs)
    attributes[1] &= ~termios.OPOST
    termios.tcsetattr(theirs, termios.TCSANOW, attributes)
    if window is not None:
        termios.tcsetwinsize(theirs, window)
    return ours, theirs
