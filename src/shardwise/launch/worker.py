"""Runs a rank as a process on this host: starts it, reads its output, and sends it signals."""

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
"""Number of reads that empties any pipe. If there is more data, a process is still writing."""


@dataclass(frozen=True, kw_only=True)
class WorkerStreams:
    """What a rank's standard streams are connected to.

    Args:
        piped: True if the output passes through the launcher.
        drawn: Those of the streams 1 and 2 that are connected to a terminal.
        window: Size of the terminal (rows, columns), or None if unknown.
        reads: True if the rank reads the launcher's standard input.
    """

    piped: bool = True
    drawn: tuple[int, ...] = ()
    window: tuple[int, int] | None = None
    reads: bool = False


class Process(Protocol):
    """A child process that leads its own session, and therefore its own process group."""

    pid: int
    returncode: int | None


Streams = tuple[int | None, int | None, int | None]
"""Descriptors for the standard input, output and error of a process. None means the launcher's own,
and `subprocess.DEVNULL` an empty input."""

Begin = Callable[[Mapping[str, str], Sequence[int], Streams], Process]
"""Starts a process, given its environment variables, inherited descriptors and standard streams."""


def program(words: Sequence[str]) -> Begin:
    """Return a function that starts a program. The function raises LaunchError if that fails.

    Args:
        words: The program and its arguments.
    """

    def begin(environ: Mapping[str, str], pass_fds: Sequence[int], streams: Streams) -> Process:
        stdin, stdout, stderr = streams
        try:
            # Start a new session. Ctrl-C on the terminal then reaches only the launcher, which
            # decides what to do with the ranks. A signal to the process group reaches everything
            # that a rank has started.
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
    """The launcher's end of a pipe or terminal that a rank writes to."""

    def __init__(self, fd: int, take: Callable[[bytes], None]) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self.open = True
        """True if more data may arrive."""
        self._take = take

    def read(self) -> bool:
        """Forward the available data. Return False at the end of the stream."""
        return self._read() != b""

    def drain(self) -> None:
        """Forward the remaining data of a rank that has exited, and close the stream."""
        # Do not wait for the end of the stream, because processes that the rank has left behind may
        # keep the pipe open for a long time.
        for _ in range(MOST_READS):
            if not self._read():
                break
        self._take(b"")
        self.open = False
        os.close(self.fd)

    def _read(self) -> bytes | None:
        """Forward the available data, and return it.

        Returns None if no data is available, and b"" at the end of the stream.
        """
        try:
            data = os.read(self.fd, READ_SIZE)
        except BlockingIOError:
            return None
        except OSError:  # EIO means that the other end of a terminal was closed
            return b""
        if data:
            self._take(data)
        return data


class Worker:
    """A rank that runs as a process, which leads its own process group.

    Args:
        rank: The rank.
        hear: Called with a stream number and new bytes, or b"" at the end of the stream.

    Attributes:
        end: The exit status, or None while the process is running.
        peak: The peak resident set size in bytes, once the process has exited.
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
        """Start the process. Raises LaunchError if that fails.

        Args:
            begin: Starts the process.
            environ: Environment variables of the process.
            pass_fds: Descriptors that the process inherits.
            outlet: How to connect the process's standard streams.
        """
        started = False
        try:
            if outlet.piped:
                self._connect(outlet)
            stdin = None if outlet.reads else subprocess.DEVNULL
            streams = stdin, self._theirs.get(STDOUT), self._theirs.get(STDERR)
            self._process = begin(environ, pass_fds, streams)
            started = True  # stays False if `begin` raises LaunchError
        except OSError as error:  # out of pipes or terminals
            raise LaunchError(f"Rank {self.rank} cannot be started: {error.strerror}.") from None
        finally:
            # The rank has inherited these descriptors. If they stayed open here, its pipes would
            # not be closed when it exits.
            for fd in set(self._theirs.values()):
                os.close(fd)
            if not started:  # `drain`, which closes the sources, will never be called
                for source in self.sources:
                    os.close(source.fd)
                self.sources = []

    @property
    def group(self) -> int:
        """Id of the rank's process group, which contains the process and its descendants."""
        return self._process.pid

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the entire process group."""
        if not self.is_gone():
            orphan_reaper.signal_group(self.group, number)

    def send_to_process(self, number: signal.Signals) -> None:
        """Send a signal to the process, but not to its children."""
        if self.end is None:  # not reaped yet, so the id still belongs to this process
            os.kill(self._process.pid, number)

    def is_gone(self) -> bool:
        """Return whether the process group is empty."""
        # Once the group is empty, do not ask again: the system may reuse its id for other
        # processes, which must not receive signals from the launcher.
        if self.end is not None and not self._gone:
            self._gone = not orphan_reaper.signal_group(self.group, 0)
        return self._gone

    def reap(self, *, stopped: bool) -> bool:
        """Return whether the process has exited, and set `end` if so.

        Args:
            stopped: True if the launcher has sent the process a signal.
        """
        # Use wait4 instead of Popen.wait, because it returns the peak memory, which helps to
        # explain a SIGKILL.
        pid, status, usage = os.wait4(self._process.pid, os.WNOHANG)
        if pid == 0:
            return False
        code = os.waitstatus_to_exitcode(status)
        self._process.returncode = code
        self.peak = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)  # macOS: bytes
        self.end = ExitStatus(rank=self.rank, code=code, time=time.time(), stopped=stopped)
        return True

    def resize(self, window: tuple[int, int]) -> None:
        """Set the size (rows, columns) of the rank's terminal, if it has one."""
        if self._terminal is not None and self.end is None:
            # Send SIGWINCH, because the kernel does so only for a controlling terminal.
            termios.tcsetwinsize(self._terminal, window)
            self.send_signal(signal.SIGWINCH)

    def _connect(self, outlet: WorkerStreams) -> None:
        """Open the terminal and the pipes for the process's output."""
        # Both drawn streams share a single terminal, as they do on a real screen. If a stream of
        # the launcher is not a terminal, the rank's stream is a pipe too, so that the rank does not
        # write control sequences to a file.
        if outlet.drawn:
            self._terminal, slave = _open_terminal(outlet.window)
            self._theirs |= dict.fromkeys(outlet.drawn, slave)
            self.sources.append(OutputSource(self._terminal, partial(self._hear, LIVE)))
        for fd in {STDOUT, STDERR} - set(outlet.drawn):
            ours, self._theirs[fd] = os.pipe()
            self.sources.append(OutputSource(ours, partial(self._hear, fd)))


def _open_terminal(window: tuple[int, int] | None) -> tuple[int, int]:
    """Open a pseudo-terminal. Return the launcher's end and the rank's end."""
    ours, theirs = os.openpty()
    attributes = termios.tcgetattr(theirs)
    # Forward bytes unchanged, because the real terminal translates newlines.
    attributes[1] &= ~termios.OPOST
    termios.tcsetattr(theirs, termios.TCSANOW, attributes)
    if window is not None:
        termios.tcsetwinsize(theirs, window)
    return ours, theirs
