"""Routes a rank's output to the screen and to its log, and keeps the last lines in memory.

streams 1, 2   from pipes: shown in complete lines, prefixed with the rank
stream 0       from a terminal: shown immediately
"""

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import BinaryIO

from shardwise.errors import LaunchError
from shardwise.launch.console import STDERR, STDOUT, Console
from shardwise.launch.screen import InterruptFilter, Lines, Tail, plain
from shardwise.messages.printable import as_utf8

LIVE = 0
"""Stream number of output that a rank writes to its terminal."""


class WorkerLog:
    """A rank's log file in `--log-dir`: the rank's output, without prefix or colours.

    Args:
        path: The file. Output is appended.
        head: Text for the first line, such as time and command.
    """

    def __init__(self, path: Path, head: str) -> None:
        self.fault = ""
        """Error message once the file cannot be written any more, "" before that."""
        self._path = path
        # Unbuffered, so that the log is complete even if the launcher is killed.
        self._file: BinaryIO = path.open("ab", buffering=0)
        self._file.write(as_utf8(f"== {head}\n"))
        self._lines: dict[int, Lines] = {}

    def feed(self, stream: int, data: bytes) -> None:
        """Append `data`, and write the lines that are now complete."""
        self._write(plain(self._lines.setdefault(stream, Lines(b"")).feed(data)))

    def end(self, stream: int) -> None:
        """Write the last line of `stream`, if it is incomplete."""
        self._write(plain(self._lines.setdefault(stream, Lines(b"")).close()))

    def close(self) -> None:
        self._file.close()

    def _write(self, data: bytes) -> None:
        try:
            while data and not self.fault:
                data = data[self._file.write(data) :]
        except OSError as error:  # a full disk must not stop the run
            self.fault = f"the log {self._path} ends here: {error.strerror or error}."


def open_log(folder: str | None, rank: int, ranks: int, command: Sequence[str]) -> WorkerLog | None:
    """Open the log file of one of `ranks` in `folder`. If it exists from an earlier run, append.

    Returns None if `folder` is None. Raises LaunchError if the file cannot be written.
    """
    if folder is None:
        return None
    moment = datetime.now().astimezone().isoformat(" ", "seconds")
    width = len(str(ranks - 1))
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        return WorkerLog(
            Path(folder, f"rank{rank:0{width}}.log"),
            f"{moment}  rank {rank} of {ranks}  {' '.join(command)}",
        )
    except OSError as error:
        raise LaunchError(
            f"--log-dir {folder} cannot be written to: {error.strerror}. "
            "Name a folder that you may write to."
        ) from None


class WorkerOutput:
    """The output of one rank.

    Args:
        rank: The rank.
        console: Writes to the screen.
        shown: True to show the output on the screen.
        log: The rank's log file, or None.

    Attributes:
        tail: The last lines of the rank's standard error, or of its terminal.
    """

    def __init__(
        self, rank: int, console: Console, *, shown: bool = True, log: WorkerLog | None = None
    ) -> None:
        self.tail = Tail()
        self._console = console
        self._shown = shown
        self._log = log
        self._lines = {fd: Lines(console.prefix(rank, fd)) for fd in (STDOUT, STDERR)}
        self._filters: dict[int, InterruptFilter] | None = None

    def hear(self, stream: int, data: bytes) -> None:
        """Handle new bytes from `stream`, or b"" at its end."""
        if not data:
            self._end(stream)
        elif self._filters is not None:
            self._show(stream, self._filters.setdefault(stream, InterruptFilter()).feed(data))
        else:
            self._show(stream, data)

    def keep(self, stream: int, data: bytes) -> None:
        """Write output to the log, but not to the screen."""
        if self._log and not self._log.fault:
            self._log.feed(stream, data)
            # Report the error only once: the next call finds `fault` set and returns early.
            if self._log.fault:
                self._console.say(f"shardwise: {self._log.fault}\n")

    def hide_interrupt(self) -> None:
        """From now on, hide tracebacks of KeyboardInterrupt. Called after Ctrl-C."""
        self._filters = {}

    def close(self) -> None:
        if self._log:
            self._log.close()

    def _show(self, stream: int, data: bytes) -> None:
        self.keep(stream, data)
        # Tracebacks are on standard error, or on the terminal, where both streams are mixed.
        if stream != STDOUT:
            self.tail.feed(data)
        if not self._shown:
            return
        if stream == LIVE:
            self._console.draw(data)
        else:
            self._console.lines(self._lines[stream].feed(data), stream)

    def _end(self, stream: int) -> None:
        # Show the output that the filter still holds back, because no more will follow.
        filtered = (self._filters or {}).pop(stream, None)
        if filtered is not None:
            self._show(stream, filtered.close())
        if self._log:
            self._log.end(stream)
        if self._shown and stream == LIVE:
            self._console.close()
        elif self._shown:
            self._console.lines(self._lines[stream].close(), stream)
