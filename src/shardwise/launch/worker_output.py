"""Routes what one rank writes: to the screen, to its log, and its last lines to memory.

stream 1, 2   what it writes to a pipe: whole lines, with the rank in front
stream 0      what it draws live on a terminal
"""

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import BinaryIO

from shardwise.errors import LaunchError
from shardwise.launch.console import STDERR, STDOUT, Console
from shardwise.launch.screen import InterruptFilter, Lines, Screen, Tail, plain
from shardwise.messages.printable import as_utf8

LIVE = 0
"""The stream of a rank that draws on a terminal."""


class WorkerLog:
    """The file in `--log-dir` that keeps what one rank says, without prefix and colours."""

    def __init__(self, path: Path, head: str) -> None:
        self.fault = ""
        """Why it is written no more, once that is so: no reason to end a run."""
        self._path = path
        self._file: BinaryIO = path.open("ab", buffering=0)
        self._file.write(as_utf8(f"== {head}\n"))
        self._lines: dict[int, Lines] = {}

    def feed(self, stream: int, data: bytes) -> None:
        """Write the lines that `data` completes."""
        self._write(plain(self._cutter(stream).feed(data)))

    def end(self, stream: int) -> None:
        """Finish the last line of `stream`."""
        self._write(plain(self._cutter(stream).close()))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, data: bytes) -> None:
        try:
            while data and not self.fault:
                data = data[self._file.write(data) :]
        except OSError as error:
            self.fault = f"{self._path} is written no more: {error.strerror or error}."

    def _cutter(self, stream: int) -> Lines:
        return self._lines.setdefault(stream, Lines(b""))


def open_logs(folder: str | None, ranks: int, command: Sequence[str]) -> list[WorkerLog | None]:
    """Open a log per rank in `folder`, which is made; what earlier runs wrote there stays.

    Raises LaunchError where that cannot be.
    """
    if folder is None:
        return [None] * ranks
    moment = datetime.now().astimezone().isoformat(" ", "seconds")
    width = len(str(ranks - 1))
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        return [
            WorkerLog(
                Path(folder, f"rank{rank:0{width}}.log"),
                f"{moment}  rank {rank} of {ranks}  {' '.join(command)}",
            )
            for rank in range(ranks)
        ]
    except OSError as error:
        raise LaunchError(
            f"--log-dir {folder} cannot be written to: {error.strerror}. "
            "Name a folder that you may write to."
        ) from None


class WorkerOutput:
    """Takes the bytes of one rank. `tail` remembers the last that it wrote to stderr."""

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
        """Take what has come on `stream`; nothing at all is the end of the stream."""
        if not data:
            self._end(stream)
        elif self._filters is not None:
            self._show(stream, self._filters.setdefault(stream, InterruptFilter()).feed(data))
        else:
            self._show(stream, data)

    def keep(self, stream: int, data: bytes) -> None:
        """Write to the log alone."""
        if self._log and not self._log.fault:
            self._log.feed(stream, data)
            if self._log.fault:
                self._console.say(f"shardwise: {self._log.fault}\n")

    def hide_interrupt(self) -> None:
        """From now on, do not show that the rank was interrupted: the user knows."""
        self._filters = {}

    def close(self) -> None:
        """Close the log."""
        if self._log:
            self._log.close()

    def _show(self, stream: int, data: bytes) -> None:
        self.keep(stream, data)
        if stream != STDOUT:
            self.tail.feed(data)
        if not self._shown:
            return
        if stream == LIVE:
            self._live_screen().draw(data)
        else:
            self._console.screen(stream).lines(self._lines[stream].feed(data))

    def _end(self, stream: int) -> None:
        filtered = (self._filters or {}).pop(stream, None)
        if filtered is not None:
            self._show(stream, filtered.close())
        if self._log:
            self._log.end(stream)
        if self._shown and stream == LIVE:
            self._live_screen().close()
        elif self._shown:
            self._console.screen(stream).lines(self._lines[stream].close())

    def _live_screen(self) -> Screen:
        assert self._console.terminal is not None
        return self._console.screen(self._console.terminal)
