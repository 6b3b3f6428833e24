"""Formats the output of many ranks for a single screen. Converts bytes to bytes, without I/O.

    a pipe      `Lines`    complete lines, each prefixed with its rank
    a terminal  `LiveRow`  every byte immediately; the last row may be redrawn (a progress bar)

If a line arrives from a pipe while a progress bar is on the screen, the bar moves down:

    [0] step 41 ####......            [1] a line from rank 1
    ^ cleared, then redrawn      ->   [0] step 41 ####......
"""

import re
from collections import deque

COLORS = (36, 35, 33, 32, 34, 31)
LONGEST_LINE = 2**16
"""Maximum length in bytes of a line from a pipe. Longer lines are split."""


def prefix(rank: int, size: int, *, color: bool) -> bytes:
    """Return the prefix for lines from `rank`, such as b"[1] ", padded to the widest prefix."""
    label = f"[{rank}]"
    blank = " " * (prefix_width(size) - len(label))
    return (
        f"\x1b[{COLORS[rank % len(COLORS)]}m{label}\x1b[0m{blank}".encode()
        if color
        else (label + blank).encode()
    )


def prefix_width(size: int) -> int:
    """Return the prefix's width in columns, in a run with `size` ranks."""
    return len(f"[{size - 1}] ")


class Lines:
    """Splits the bytes from a pipe into lines, and adds a prefix to each.

    If a line contains carriage returns, as a progress bar does, only its last state is kept. Blank
    lines have no prefix.
    """

    def __init__(self, prefix: bytes) -> None:
        self._prefix = prefix
        self._rest = b""

    def feed(self, data: bytes) -> bytes:
        """Append `data`, and return the lines that are now complete."""
        *whole, rest = (self._rest + data).split(b"\n")
        # A progress bar may grow for hours without a newline, so keep only its last state.
        if len(rest) > LONGEST_LINE:
            rest = _last_state(rest)
        if len(rest) > LONGEST_LINE:
            whole, rest = [*whole, rest], b""
        self._rest = rest
        return b"".join(self._line(line) for line in whole)

    def close(self) -> bytes:
        """Return the last line if it is incomplete, otherwise b""."""
        rest, self._rest = self._rest, b""
        return self._line(rest) if rest else b""

    def _line(self, line: bytes) -> bytes:
        seen = _last_state(line)
        return (self._prefix + seen if seen else b"") + b"\n"


def _last_state(line: bytes) -> bytes:
    return line.rstrip(b"\r").rpartition(b"\r")[2]


_ESCAPES = re.compile(
    rb"\x1b\[[0-?]*[ -/]*[@-~]"  # CSI: colours, cursor movement
    rb"|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[ -/]*[0-Z\\^-~]"  # titles and others
    rb"|[\x00-\x08\x0b-\x1f\x7f]"
)
_UP = re.compile(rb"\x1b\[(\d*)[AF]")
_PIECES = re.compile(rb"(\r|\n|\x1b\[[0-?]*[ -/]*[@-~])")

CLEAR, SHOW_CURSOR, HIDE_CURSOR = b"\r\x1b[0m\x1b[J", b"\x1b[?25h", b"\x1b[?25l"


class LiveRow:
    """Forwards the bytes from a rank's terminal, with a prefix at the start of each row.

    It stores the last row, so that `clear` and `redraw` can move a progress bar below other ranks'
    lines. A progress bar with several rows is not redrawn, and continues below such lines.
    """

    def __init__(self, prefix: bytes) -> None:
        self._prefix = prefix
        self._row = b""
        self._at_start = True
        self._hides_cursor = False
        self._up = 0
        """Number of rows between the cursor and the last row."""
        self._keeps_below = False
        """True if moving the cursor up would overwrite lines from other ranks."""

    def feed(self, data: bytes) -> bytes:
        """Return the bytes to write to the real terminal once the rank has written `data`."""
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
                # The prefix must follow sequences that erase the row, but precede colours.
                self._row = b"" if piece.endswith((b"J", b"K")) else self._row
            elif self._at_start:
                self._at_start = self._keeps_below = False
                piece = self._row = self._prefix + piece
            else:
                self._row = (self._row + piece)[:LONGEST_LINE]
            shown += piece
        return shown

    def clear(self) -> bytes:
        """Return the bytes that erase the last row, or move below a bar with several rows."""
        self._keeps_below = True
        if not self._up:
            return CLEAR if self._row else b""
        below = b"\x1b[%dB\r\n" % self._up
        self._row, self._up, self._at_start = b"", 0, True
        return below

    def redraw(self) -> bytes:
        """Return the bytes that redraw the last row and restore the cursor."""
        return self._row + (b"\r" if self._row and self._at_start else b"")

    def close(self) -> bytes:
        """Return the bytes that finish the last row, reset colours and show the cursor."""
        # A script that was killed could not restore the terminal itself.
        end = b"\x1b[0m" if b"\x1b" in self._row.removeprefix(self._prefix) else b""
        end += SHOW_CURSOR if self._hides_cursor else b""
        end += b"\n" if self._row else b""
        self._row, self._at_start, self._hides_cursor = b"", True, False
        return end


_TRACEBACKS = re.compile(rb"Traceback \(most recent call last\):|Exception ignored in")


class InterruptFilter:
    """Hides KeyboardInterrupt tracebacks after Ctrl-C, and forwards all other output.

    Also hides tracebacks that Python introduces with "Exception ignored in".
    """

    def __init__(self) -> None:
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        """Return the output before the first traceback, and hold back the rest until `close`."""
        data = self._held + data
        found = _TRACEBACKS.search(data)
        start = found.start() if found else len(data)
        self._held = data[start:]
        return data[:start]

    def close(self) -> bytes:
        """Return the output that was held back, unless it ends with a KeyboardInterrupt.

        A traceback that is cut off before the line that names its exception is hidden too, because
        the rank was stopped while it was still printing.
        """
        lines = self._held.rstrip().split(b"\n")
        is_cut = all(line.startswith(b" ") or _TRACEBACKS.match(line) for line in lines)
        return b"" if is_cut or lines[-1].startswith(b"KeyboardInterrupt") else self._held


class Tail:
    """The last lines of a stream, for the report about a failed rank."""

    # 1000 lines, because after a crash faulthandler writes the stacks of all threads after the
    # line that names the cause.

    def __init__(self, length: int = 1000) -> None:
        self._lines: deque[bytes] = deque(maxlen=length)
        self._cutter = Lines(b"")

    def feed(self, data: bytes) -> None:
        self._lines.extend(self._cutter.feed(data).splitlines())

    def text(self) -> str:
        """Return the last lines as text, without colours and other control sequences."""
        self._lines.extend(self._cutter.close().splitlines())
        return plain(b"\n".join(self._lines)).decode(errors="replace")


def plain(text: bytes) -> bytes:
    """Return `text` without colours and other control sequences. Newlines remain."""
    return _ESCAPES.sub(b"", text)
