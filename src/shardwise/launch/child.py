"""One rank as the launcher holds it: its process, and what comes out of it."""

import os
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Mapping, Sequence

from shardwise.errors import LaunchError
from shardwise.launch import warden
from shardwise.launch.console import STDERR, STDOUT, Console
from shardwise.launch.output import Hush, Lines, Tail
from shardwise.launch.verdict import End

READ_SIZE = 2**16
MOST_READS = 64
"""So many reads empty any pipe; what still comes then is written by someone who goes on."""


class Source:
    """The end of a pipe or terminal that a rank writes to; `open` until it is drained."""

    def __init__(self, fd: int, take: Callable[[bytes], None], finish: Callable[[], None]) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self.open = True
        self._hush: Hush | None = None
        self._take = take
        self._finish = finish

    def read(self) -> bool:
        """Pass on what has come; False at the end of the stream."""
        return self._read() != b""

    def hush(self) -> None:
        """From now on, do not show that the rank was interrupted: the user knows."""
        self._hush = Hush()

    def drain(self) -> None:
        """Pass on what the ended rank has left; do not wait for others who hold the pipe."""
        for _ in range(MOST_READS):
            if not self._read():
                break
        if self._hush:
            self._take(self._hush.close())
        self._finish()
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
            self._take(self._hush.feed(data) if self._hush else data)
        return data


class Child:
    """A rank that was started in a process group of its own.

    `end` is None while it runs, `peak` its largest resident set in bytes once it has ended.
    """

    def __init__(self, rank: int, console: Console) -> None:
        self.rank = rank
        self.sources: list[Source] = []
        self.end: End | None = None
        self.peak = 0
        self.tail = Tail()
        self._console = console
        self._theirs: dict[int, int] = {}
        self._terminal: int | None = None
        self._slave: int | None = None

    def start(self, words: Sequence[str], environ: Mapping[str, str], pass_fds: list[int]) -> None:
        """Start the process. Raises LaunchError when the system refuses."""
        if self._console.size > 1:
            self._connect()
        try:
            self._process = subprocess.Popen(
                words,
                env=environ,
                stdin=None if self.rank == 0 else subprocess.DEVNULL,
                stdout=self._theirs.get(STDOUT),
                stderr=self._theirs.get(STDERR),
                pass_fds=pass_fds,
                start_new_session=True,
            )
        except OSError as error:
            raise LaunchError(f"{words[0]} cannot be started: {error.strerror}.") from None
        finally:
            for fd in set(self._theirs.values()):
                os.close(fd)

    @property
    def group(self) -> int:
        """The process group of the rank: the process itself and all that it starts."""
        return self._process.pid

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the whole process group."""
        warden.send(self.group, number)

    def is_gone(self) -> bool:
        """Whether nothing is left of the process group."""
        return self.end is not None and not warden.send(self.group, 0)

    def reap(self, *, stopped: bool) -> bool:
        """Note the end of the process, where it has ended since; whether it has."""
        pid, status, usage = os.wait4(self._process.pid, os.WNOHANG)
        if pid == 0:
            return False
        code = os.waitstatus_to_exitcode(status)
        self._process.returncode = code
        self.peak = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        self.end = End(rank=self.rank, code=code, time=time.time(), stopped=stopped)
        return True

    def hush(self) -> None:
        """Show no traceback of the interrupt that is about to come."""
        for source in self.sources:
            source.hush()

    def resize(self) -> None:
        """Tell a rank that draws live the new width of the terminal."""
        size = self._console.width()
        if self._terminal is not None and self.end is None and size is not None:
            termios.tcsetwinsize(self._terminal, size)
            self.send(signal.SIGWINCH)

    def _connect(self) -> None:
        """Make what the process will write to: a terminal for rank 0 where we have one."""
        for fd in (STDOUT, STDERR):
            if self.rank == 0 and self._console.terminal is not None and os.isatty(fd):
                self._theirs[fd] = self._slave or self._draw(self._console.terminal)
            else:
                self._theirs[fd] = self._pipe(fd)

    def _pipe(self, fd: int) -> int:
        ours, theirs = os.pipe()
        screen, lines = self._console.screen(fd), Lines(self._console.prefix(self.rank, fd))

        def take(data: bytes) -> None:
            if fd == STDERR:
                self.tail.feed(data)
            screen.lines(lines.feed(data))

        self.sources.append(Source(ours, take, lambda: screen.lines(lines.close())))
        return theirs

    def _draw(self, fd: int) -> int:
        """A terminal whose other end draws live on our own `fd`."""
        self._terminal, self._slave = _open_terminal(self._console.width())
        screen = self._console.screen(fd)

        def take(data: bytes) -> None:
            self.tail.feed(data)
            screen.draw(data)

        self.sources.append(Source(self._terminal, take, screen.close))
        return self._slave


def _open_terminal(size: tuple[int, int] | None) -> tuple[int, int]:
    """A pseudo-terminal that passes bytes as they are: our own terminal translates newlines."""
    ours, theirs = os.openpty()
    attributes = termios.tcgetattr(theirs)
    attributes[1] &= ~termios.OPOST
    termios.tcsetattr(theirs, termios.TCSANOW, attributes)
    if size is not None:
        termios.tcsetwinsize(theirs, size)
    return ours, theirs
