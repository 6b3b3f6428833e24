"""Gives the launcher's standard output and error to its ranks as screens.

Also opens standard streams that were closed when the command was started.
"""

from __future__ import annotations

import errno
import io
import os
import select
import sys
from codecs import getincrementaldecoder
from collections.abc import Mapping
from contextlib import suppress
from typing import TextIO

from shardwise.launch.screen import LiveRows, Screen, prefix, prefix_width
from shardwise.messages.printable import as_utf8

STDOUT, STDERR = 1, 2


class Console:
    """Two screens, `out` and `err`; one and the same where both are the terminal.

    `size` is the number of ranks; `piped` when what they write comes through us, as it must with
    more than one. `terminal` is the descriptor of the terminal that rank 0 draws live on, None
    without one. `broken` says why where an output cannot be written any more, "" until then.
    `streams` are what Python writes to in place of descriptors, such as those of a notebook.
    """

    def __init__(
        self,
        size: int,
        environ: Mapping[str, str],
        *,
        piped: bool = False,
        streams: Mapping[int, TextIO] | None = None,
    ) -> None:
        self.size = size
        self._streams = streams or {}
        self._decoders = {fd: getincrementaldecoder("utf-8")("replace") for fd in self._streams}
        self.piped = piped or size > 1 or bool(streams)
        self.broken = ""
        self._lost: set[int] = set()
        self._terminals = [
            fd for fd in (STDOUT, STDERR) if fd not in self._streams and os.isatty(fd)
        ]
        self._color = not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"
        live = bool(self._terminals) and self.piped and environ.get("TERM") != "dumb"
        self.terminal = self._terminals[0] if live else None
        self.out = self._screen(STDOUT)
        self.err = self.out if len(self._terminals) == 2 else self._screen(STDERR)

    def screen(self, fd: int) -> Screen:
        """The screen for what ranks write to `fd`, 1 or 2."""
        return self.out if fd == STDOUT else self.err

    @property
    def drawn(self) -> tuple[int, ...]:
        """Which of its streams rank 0 draws live on the terminal."""
        return () if self.terminal is None else tuple(self._terminals)

    def prefix(self, rank: int, fd: int) -> bytes:
        """What stands before the lines of `rank` on `fd`; nothing where there is only one."""
        if self.size == 1:
            return b""
        return prefix(rank, self.size, color=self._color and fd in self._terminals)

    def window(self) -> tuple[int, int] | None:
        """Rows and columns of the terminal, less the prefix; None where nobody watches."""
        if not self._terminals:
            return None
        columns, rows = os.get_terminal_size(self._terminals[0])
        taken = prefix_width(self.size) if self.size > 1 else 0
        return (rows, columns - taken) if columns > taken else None

    def say(self, words: str) -> None:
        """Show whole lines of our own."""
        self.err.lines(as_utf8(words))

    def close(self) -> None:
        """Leave the cursor where a new line may be written."""
        self.out.close()
        if self.err is not self.out:
            self.err.close()

    def _screen(self, fd: int) -> Screen:
        live = LiveRows(self.prefix(0, fd)) if fd == self.terminal else None
        return Screen(lambda data: self._write(fd, data), live)

    def _write(self, fd: int, data: bytes) -> None:
        """Write all of `data`, also where someone has set our output to non-blocking."""
        if fd in self._streams:
            self._streams[fd].write(self._decoders[fd].decode(data))
            self._streams[fd].flush()
            return
        while data and fd not in self._lost:
            try:
                data = data[os.write(fd, data) :]
            except BlockingIOError:
                select.select([], [fd], [])
            except OSError as error:  # the reader, or the terminal, is gone
                self._lost.add(fd)
                gone = error.errno in (errno.EPIPE, errno.EIO)
                self.broken = self.broken or (
                    "nobody reads the output any more"
                    if gone
                    else f"the output cannot be written ({error.strerror})"
                )


def open_standard_streams() -> str:
    """Open standard streams that are closed, so that nothing else is opened in their place.

    A closed input becomes an empty one, and what goes to closed errors is lost. From then on the
    output takes any text, file names that are not UTF-8 included.

    Returns, as a sentence, that the output is closed; "" where it is not.
    """
    closed = [fd for fd in (0, 1, 2) if not _is_open(fd)]
    for fd in closed:
        flags = os.O_RDONLY if fd == 0 else os.O_WRONLY
        opened = os.open(os.devnull, flags)
        if opened != fd:
            os.dup2(opened, fd)
            os.close(opened)
        os.set_inheritable(fd, True)
    if 2 in closed:
        sys.stderr = os.fdopen(2, "w", closefd=False)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    if 1 not in closed:
        return ""
    return (
        "standard output is closed, where ranks are to be heard: lead it to a file, or to "
        "/dev/null."
    )


def forget_unwritten() -> None:
    """Drop what standard output did not take, so that Python does not try again at its end."""
    with suppress(OSError, ValueError, AttributeError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True
