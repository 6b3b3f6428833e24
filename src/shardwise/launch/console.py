"""Writes the output of all ranks to the launcher's standard output and error.

It also replaces standard streams that were closed when the command started.
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

from shardwise.launch.screen import LiveRow, prefix, prefix_width
from shardwise.messages.printable import as_utf8

STDOUT, STDERR = 1, 2


class Console:
    """Writes the output of a run.

    On a terminal, rank 0's output appears immediately. All other output is written in complete
    lines.

    Args:
        size: Number of ranks.
        environ: Environment variables, which describe the terminal.
        piped: True to pass the output through the launcher. Ignored with several ranks, whose
            output always passes through it.
        streams: Python streams that replace descriptors 1 and 2, as in a notebook.

    Attributes:
        broken: Why the output can no longer be written, or "" while it can.
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
        is_smart = environ.get("TERM") != "dumb"
        self._color = is_smart and not environ.get("NO_COLOR")
        # Without pipes, the only rank writes directly to the terminal.
        self._live = None
        if self._terminals and self.piped and is_smart:
            self._live = LiveRow(self.prefix(0, self._terminals[0]))

    @property
    def drawn(self) -> tuple[int, ...]:
        """Those of rank 0's streams (1 and 2) that appear on the terminal immediately."""
        return () if self._live is None else tuple(self._terminals)

    def prefix(self, rank: int, fd: int) -> bytes:
        """Return the prefix for lines from `rank` on `fd`, or b"" if there is only one rank."""
        if self.size == 1:
            return b""
        return prefix(rank, self.size, color=self._color and fd in self._terminals)

    def window(self) -> tuple[int, int] | None:
        """Return the terminal size (rows, columns), excluding the columns that the prefix takes up.

        Returns None if there is no terminal, or if it is too narrow.
        """
        if not self._terminals:
            return None
        columns, rows = os.get_terminal_size(self._terminals[0])
        taken = prefix_width(self.size) if self.size > 1 else 0
        return (rows, columns - taken) if columns > taken else None

    def lines(self, text: bytes, fd: int = STDERR) -> None:
        """Write complete lines. On a terminal they appear above rank 0's progress bar."""
        if fd in self._terminals:
            fd = self._terminals[0]  # standard output and error share the screen
            if text and self._live is not None:
                text = self._live.clear() + text + self._live.redraw()
        self._write(fd, text)

    def draw(self, data: bytes) -> None:
        """Write rank 0's output to the terminal immediately."""
        assert self._live is not None
        self._write(self._terminals[0], self._live.feed(data))

    def say(self, words: str) -> None:
        """Print complete lines from the launcher."""
        self.lines(as_utf8(words))

    def close(self) -> None:
        """Finish the last row on the terminal, and restore its colours and cursor."""
        if self._live is not None:
            self._write(self._terminals[0], self._live.close())

    def _write(self, fd: int, data: bytes) -> None:
        # A notebook's streams accept only text, so decode incrementally.
        if data and fd in self._streams:
            self._streams[fd].write(self._decoders[fd].decode(data))
            self._streams[fd].flush()
            return
        # Write to the descriptor instead of sys.stdout, because ranks may output arbitrary bytes.
        while data and fd not in self._lost:
            try:
                data = data[os.write(fd, data) :]
            except BlockingIOError:  # another process has set the shared descriptor to non-blocking
                select.select([], [fd], [])
            except OSError as error:  # the reader has exited, or the disk is full
                self._lost.add(fd)
                gone = error.errno in (errno.EPIPE, errno.EIO)
                self.broken = self.broken or (
                    "nobody reads the output any more"
                    if gone
                    else f"the output cannot be written ({error.strerror})"
                )


def open_standard_streams() -> str:
    """Replace closed standard streams with /dev/null.

    Also makes standard output accept any text, including file names that are not valid UTF-8.

    Returns:
        An error message if standard output was closed, else "".
    """
    closed = []
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            closed.append(fd)
    # If a standard stream stayed closed, the next file or socket that is opened would get its
    # descriptor, and print would write into that file.
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
        "standard output is closed, so the output of ranks would be lost: redirect it to a file "
        "or to /dev/null."
    )


def forget_unwritten() -> None:
    """Discard buffered output, so that Python does not try to write it again at exit."""
    with suppress(OSError, ValueError, AttributeError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
