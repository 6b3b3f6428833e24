"""Prepares the output of many ranks for one screen. Pure: bytes go in, bytes come out.

    a pipe     `Lines`    whole lines only, each with its rank in front
    a terminal `LiveRow`  everything at once; the last row may be drawn again (a progress bar)

When a line arrives from a pipe while a bar is on the screen, the bar makes room:

    [0] step 41 ####......            [1] the line of rank 1
    ^ cleared, then drawn again  ->   [0] step 41 ####......
"""

import re
from collections import deque

COLORS = (36, 35, 33, 32, 34, 31)
LONGEST_LINE = 2**16
"""A line from a pipe that grows beyond this many bytes is cut."""


def prefix(rank: int, size: int, *, color: bool) -> bytes:
    """Return the prefix of lines of `rank`, such as b"[1] ". All ranks have the same width."""
    label = f"[{rank}]"
    blank = " " * (prefix_width(size) - len(label))
    return (
        f"\x1b[{COLORS[rank % len(COLORS)]}m{label}\x1b[0m{blank}".encode()
        if color
        else (label + blank).encode()
    )


def prefix_width(size: int) -> int:
    """Return the columns of the prefix in a run of `size` ranks."""
    return len(f"[{size - 1}] ")


class Lines:
    """Cuts the bytes of a pipe into whole lines with a prefix.

    Of a line with carriage returns, such as a progress bar, only the last state is kept. Blank
    lines get no prefix.
    """

    def __init__(self, prefix: bytes) -> None:
        self._prefix = prefix
        self._rest = b""

    def feed(self, data: bytes) -> bytes:
        """Return the lines that `data` completes."""
        *whole, rest = (self._rest + data).split(b"\n")
        if len(rest) > LONGEST_LINE:
            rest = _last_state(rest)
        if len(rest) > LONGEST_LINE:
            whole, rest = [*whole, rest], b""
        self._rest = rest
        return b"".join(self._line(line) for line in whole)

    def close(self) -> bytes:
        """Return the last line, if it has no end yet."""
        rest, self._rest = self._rest, b""
        return self._line(rest) if rest else b""

    def _line(self, line: bytes) -> bytes:
        seen = _last_state(line)
        return (self._prefix + seen if seen else b"") + b"\n"


def _last_state(line: bytes) -> bytes:
    return line.rstrip(b"\r").rpartition(b"\r")[2]


_ESCAPES = re.compile(
    rb"\x1b\[[0-?]*[ -/]*[@-~]"  # CSI: colours, moves of the cursor
    rb"|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[ -/]*[0-Z\\^-~]"  # titles and the like
    rb"|[\x00-\x08\x0b-\x1f\x7f]"
)
_UP = re.compile(rb"\x1b\[(\d*)[AF]")
_PIECES = re.compile(rb"(\r|\n|\x1b\[[0-?]*[ -/]*[@-~])")

CLEAR, SHOW_CURSOR, HIDE_CURSOR = b"\r\x1b[0m\x1b[J", b"\x1b[?25h", b"\x1b[?25l"


class LiveRow:
    """Passes the bytes of a terminal through, with a prefix at the start of each row.

    It remembers the last row, which is enough for a progress bar: `clear` and `redraw` make room
    for lines from elsewhere above it. Bars of several rows start again below such lines.
    """

    def __init__(self, prefix: bytes) -> None:
        self._prefix = prefix
        self._row = b""
        self._at_start = True
        self._hides_cursor = False
        self._up = 0
        """Rows that the cursor is above the last one."""
        self._keeps_below = False
        """Whether the rows above hold lines from elsewhere, which moves up would overwrite."""

    def feed(self, data: bytes) -> bytes:
        """Return the bytes to write to the real terminal for `data`."""
        shown = b""
        for piece in filter(None, _PIECES.split(data)):
            if piece in (b"\r", b"\n"):
                self._at_start = True
                self._row = self._row if piece == b"\r" else b""
                self._up = max(0, self._up - (piece == b"\n"))
            elif (up := _UP.fullmatch(piece)) is not None:
                if self._keeps_below:
                    continue
                self._up += int(up[1] or 1)
            elif piece in (SHOW_CURSOR, HIDE_CURSOR):
                self._hides_cursor = piece == HIDE_CURSOR
            elif self._at_start and piece.startswith(b"\x1b[") and not piece.endswith(b"m"):
                # Sequences that erase the row go before the prefix, and colours after it.
                self._row = b"" if piece.endswith((b"J", b"K")) else self._row
            elif self._at_start:
                self._at_start = self._keeps_below = False
                piece = self._row = self._prefix + piece
            else:
                self._row = (self._row + piece)[:LONGEST_LINE]
            shown += piece
        return shown

    def clear(self) -> bytes:
        """Return what erases the last row, or leaves rows that the cursor has moved up from."""
        self._keeps_below = True
        if not self._up:
            return CLEAR if self._row else b""
        below = b"\x1b[%dB\r\n" % self._up
        self._row, self._up, self._at_start = b"", 0, True
        return below

    def redraw(self) -> bytes:
        """Return what draws the last row again, with the cursor where it was."""
        return self._row + (b"\r" if self._row and self._at_start else b"")

    def close(self) -> bytes:
        """Return what ends the last row and all colours, and shows the cursor again."""
        # A script that was killed could not do so itself.
        end = b"\x1b[0m" if b"\x1b" in self._row.removeprefix(self._prefix) else b""
        end += SHOW_CURSOR if self._hides_cursor else b""
        end += b"\n" if self._row else b""
        self._row, self._at_start, self._hides_cursor = b"", True, False
        return end


_TRACEBACKS = re.compile(rb"Traceback \(most recent call last\):|Exception ignored in")


class InterruptFilter:
    """Hides tracebacks of the interrupt after Ctrl-C, and lets all others through.

    Also those from places where Python can raise nothing ("Exception ignored in").
    """

    def __init__(self) -> None:
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        """Return the part of `data` that may be shown now."""
        data = self._held + data
        found = _TRACEBACKS.search(data)
        start = found.start() if found else len(data)
        self._held = data[start:]
        return data[:start]

    def close(self) -> bytes:
        """Return text that was held back and is no interrupt."""
        last = self._held.rstrip().rpartition(b"\n")[2]
        return b"" if last.startswith(b"KeyboardInterrupt") else self._held


class Tail:
    """Remembers the last lines of a stream, for the report of a failed rank."""

    # After a crash faulthandler writes the stacks of all threads: the cause is above them.

    def __init__(self, length: int = 1000) -> None:
        self._lines: deque[bytes] = deque(maxlen=length)
        self._cutter = Lines(b"")

    def feed(self, data: bytes) -> None:
        """Remember `data`."""
        self._lines.extend(self._cutter.feed(data).splitlines())

    def text(self) -> str:
        """Return the last lines, without colours and other control sequences."""
        self._lines.extend(self._cutter.close().splitlines())
        return plain(b"\n".join(self._lines)).decode(errors="replace")


def plain(text: bytes) -> bytes:
    """Return `text` without colours and other control sequences, but with its newlines."""
    return _ESCAPES.sub(b"", text)
