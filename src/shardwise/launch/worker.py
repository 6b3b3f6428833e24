"""A rank as a process of this host: starts it, reads its output, ends it."""

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
"""Number of reads that empties any pipe. Data after that is from a process that still writes."""


@dataclass(frozen=True, kw_only=True)
class WorkerStreams:
    """The connections of a rank's standard streams.

    Args:
        piped: The output goes through the launcher.
        drawn: Which of the streams 1 and 2 are a terminal.
        window: The rows and columns of that terminal, if known.
        reads: The rank reads our standard input.
    """

    piped: bool = True
    drawn: tuple[int, ...] = ()
    window: tuple[int, int] | None = None
    reads: bool = False


class Process(Protocol):
    """A child process that leads its own session, and so its own process group."""

    pid: int
    returncode: int | None


Streams = tuple[int | None, int | None, int | None]
"""Descriptors for the standard input, output and error of a process. None means ours, and
`subprocess.DEVNULL` an empty input."""

Begin = Callable[[Mapping[str, str], Sequence[int], Streams], Process]
"""Starts a process, given its variables, inherited descriptors and standard streams."""


def program(words: Sequence[str]) -> Begin:
    """Return a function that starts the program `words`. It raises LaunchError on failure."""

    def begin(environ: Mapping[str, str], pass_fds: Sequence[int], streams: Streams) -> Process:
        stdin, stdout, stderr = streams
        try:
            # Its own session: Ctrl-C on the terminal reaches only the launcher, which decides about
            # the ranks, and one signal reaches everything that a rank has started.
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
    """Our end of a pipe or terminal that a rank writes to."""

    def __init__(self, fd: int, take: Callable[[bytes], None]) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self.open = True
        """Whether more data may arrive."""
        self._take = take

    def read(self) -> bool:
        """Forward available data. Return False at the end of the stream."""
        return self._read() != b""

    def drain(self) -> None:
        """Forward the remaining data of a rank that has ended."""
        # Do not read to the end of the stream: processes that the rank left behind may keep the
        # pipe open for long.
        for _ in range(MOST_READS):
            if not self._read():
                break
        self._take(b"")
        self.open = False
        os.close(self.fd)

    def _read(self) -> bytes | None:
        """Forward and return available data; None without any, b"" at the end."""
        try:
            data = os.read(self.fd, READ_SIZE)
        except BlockingIOError:
            return None
        except OSError:  # EIO: the other end of a terminal was closed
            return b""
        if data:
            self._take(data)
        return data


class Worker:
    """A rank as a process that leads its own process group.

    `end` is None while it runs. After its end `peak` is its largest resident set in bytes.

    Args:
        rank: The rank.
        hear: Called with the number of a stream and new bytes of it; b"" ends the stream.
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
        """Start the process. Raises LaunchError if that fails."""
        started = False
        try:
            if outlet.piped:
                self._connect(outlet)
            stdin = None if outlet.reads else subprocess.DEVNULL
            streams = stdin, self._theirs.get(STDOUT), self._theirs.get(STDERR)
            self._process = begin(environ, pass_fds, streams)
            started = True  # LaunchError of `begin` must close our ends too
        except OSError as error:  # out of pipes or terminals
            raise LaunchError(f"Rank {self.rank} cannot be started: {error.strerror}.") from None
        finally:
            # The rank has copies. If ours stayed open, a pipe would not end with the rank.
            for fd in set(self._theirs.values()):
                os.close(fd)
            if not started:  # nobody will ever drain the sources
                for source in self.sources:
                    os.close(source.fd)
                self.sources = []

    @property
    def group(self) -> int:
        """The process group of the rank: the process, and the processes that it starts."""
        return self._process.pid

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the whole process group."""
        if not self.is_gone():
            orphan_reaper.signal_group(self.group, number)

    def send_to_process(self, number: signal.Signals) -> None:
        """Send a signal to the process, but not to the processes that it has started."""
        if self.end is None:  # not reaped yet, so the id still belongs to this process
            os.kill(self._process.pid, number)

    def is_gone(self) -> bool:
        """Return whether the process group is empty."""
        # Remember the answer: the system may give the id of an empty group to other processes,
        # which must get no signals from us.
        if self.end is not None and not self._gone:
            self._gone = not orphan_reaper.signal_group(self.group, 0)
        return self._gone

    def reap(self, *, stopped: bool) -> bool:
        """Return whether the process has ended, and set `end` in that case."""
        # Not Popen.wait: only wait4 returns the peak memory, which explains a SIGKILL.
        pid, status, usage = os.wait4(self._process.pid, os.WNOHANG)
        if pid == 0:
            return False
        code = os.waitstatus_to_exitcode(status)
        self._process.returncode = code
        self.peak = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)  # macOS: bytes
        self.end = ExitStatus(rank=self.rank, code=code, time=time.time(), stopped=stopped)
        return True

    def resize(self, window: tuple[int, int]) -> None:
        """Pass on the new rows and columns of the terminal to a rank that draws live."""
        if self._terminal is not None and self.end is None:
            # It is not the rank's controlling terminal, so the kernel sends no SIGWINCH itself.
            termios.tcsetwinsize(self._terminal, window)
            self.send_signal(signal.SIGWINCH)

    def _connect(self, outlet: WorkerStreams) -> None:
        """Open the terminal and the pipes that the process will write to."""
        # Both drawn streams share one terminal, as they do on a real screen. Streams that are not a
        # terminal in the launcher are pipes for the rank too, so that it does not draw into a file.
        if outlet.drawn:
            self._terminal, slave = _open_terminal(outlet.window)
            self._theirs |= dict.fromkeys(outlet.drawn, slave)
            self.sources.append(OutputSource(self._terminal, partial(self._hear, LIVE)))
        for fd in {STDOUT, STDERR} - set(outlet.drawn):
            ours, self._theirs[fd] = os.pipe()
            self.sources.append(OutputSource(ours, partial(self._hear, fd)))


def _open_terminal(window: tuple[int, int] | None) -> tuple[int, int]:
    """Open a pseudo-terminal; return our end and the rank's."""
    ours, theirs = os.openpty()
    attributes = termios.tcgetattr(theirs)
    # Forward bytes unchanged: our own terminal translates newlines later.
    attributes[1] &= ~termios.OPOST
    termios.tcsetattr(theirs, termios.TCSANOW, attributes)
    if window is not None:
        termios.tcsetwinsize(theirs, window)
    return ours, theirs
