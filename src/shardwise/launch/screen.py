"""Merges the output of many ranks on one screen, and keeps a progress bar alive.

Pure: bytes go in, bytes come out. Two kinds of source meet on a `Screen`:

    a pipe     `Lines`  whole lines only, each with its rank in front
    a terminal `Live`   everything at once; the last rows may be redrawn (a progress bar)

When a line comes from a pipe while a bar is on the screen, the bar makes room:

    [0] step 41 ####......            [1] the line of rank 1
    ^ cleared, then drawn again  ->   [0] step 41 ####......
"""

import re
from collections import deque
from collections.abc import Callable

COLORS = (36, 35, 33, 32, 34, 31)
LONGEST_LINE = 2**16
"""A line from a pipe that grows beyond this many bytes is cut."""

ROWS_KEPT = 64
"""How many rows above its cursor a live source may move up to and find redrawn."""


def prefix(rank: int, size: int, *, color: bool) -> bytes:
    """What stands before each line of `rank`, such as b"[1] ", equally wide for all ranks."""
    label = f"[{rank}]"
    blank = " " * (prefix_width(size) - len(label))
    return (
        f"\x1b[{COLORS[rank % len(COLORS)]}m{label}\x1b[0m{blank}".encode()
        if color
        else (label + blank).encode()
    )


def prefix_width(size: int) -> int:
    """Columns that the prefix takes in a run of `size` ranks."""
    return len(f"[{size - 1}] ")


class Lines:
    """Cuts the bytes of a pipe into whole lines with a prefix.

    Of a line that was overwritten by carriage returns (a progress bar that does not know that
    nobody watches) only the last state is kept. Blank lines get no prefix.
    """

    def __init__(self, prefix: bytes) -> None:
        self._prefix = prefix
        self._rest = b""

    def feed(self, data: bytes) -> bytes:
        """The lines that `data` completes."""
        *whole, rest = (self._rest + data).split(b"\n")
        if len(rest) > LONGEST_LINE:
            rest = _last_state(rest)
        if len(rest) > LONGEST_LINE:
            whole, rest = [*whole, rest], b""
        self._rest = rest
        return b"".join(self._line(line) for line in whole)

    def close(self) -> bytes:
        """The unfinished last line, finished."""
        rest, self._rest = self._rest, b""
        return self._line(rest) if rest else b""

    def _line(self, line: bytes) -> bytes:
        seen = _last_state(line)
        return (self._prefix + seen if seen else b"") + b"\n"


def _last_state(line: bytes) -> bytes:
    return line.rstrip(b"\r").rpartition(b"\r")[2]


_TOKEN = re.compile(
    rb"(?P<csi>\x1b\[(?P<args>[0-?]*)[ -/]*(?P<final>[@-~]))"
    rb"|(?P<escape>\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[ -/]*[0-Z\\^-~])"
    rb"|(?P<text>[^\x00-\x08\x0a-\x1f\x7f]+)"
    rb"|(?P<control>.)",
    re.DOTALL,
)
_UNFINISHED = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*|\][^\x07\x1b]{0,256}\x1b?|[ -/]*)?\Z")


class LiveRows:
    """Passes the bytes of a terminal through, with a prefix at the start of each row.

    It remembers the rows that the source may still redraw, the *region*: the last row, and as
    many rows above it as the source last moved its cursor up. `clear` and `redraw` make room for
    lines from elsewhere above the region.
    """

    def __init__(self, prefix: bytes) -> None:
        self._prefix = prefix
        self._rows = [bytearray()]
        self._row = 0
        self._height = 1
        self._newlines = 0
        self._home = True
        self._style = b""
        self._hidden = False
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        """What to write to the real terminal for `data`; an unfinished sequence is held back."""
        data = self._held + data
        unfinished = _UNFINISHED.search(data)
        end = unfinished.start() if unfinished else len(data)
        self._held = data[end:]
        return b"".join(self._token(match) for match in _TOKEN.finditer(data, 0, end))

    def clear(self) -> bytes:
        """Erase the region and leave the cursor where its first row began."""
        if not self._visible():
            return b""
        up = self._row - self._top
        return b"\r" + (b"\x1b[%dA" % up if up else b"") + b"\x1b[0m\x1b[J"

    def redraw(self) -> bytes:
        """Draw the region again from its first row and put the cursor back."""
        if not self._visible():
            return b""
        drawn = b"\n".join(self._rows[self._top :])
        down = len(self._rows) - 1 - self._row
        if down:
            drawn += b"\x1b[%dA\r" % down + self._rows[self._row]
        return drawn + (b"\r" if self._home else b"") + self._style

    def close(self) -> bytes:
        """End the last row, show the cursor and end all colours."""
        end = b"\x1b[0m" if self._style else b""
        end += b"\x1b[?25h" if self._hidden else b""
        end += b"\n" * (len(self._rows) - self._row - 1) + (b"\n" if self._rows[-1] else b"")
        self._rows, self._row, self._home = [bytearray()], 0, True
        self._style, self._hidden = b"", False
        return end

    @property
    def _top(self) -> int:
        return max(0, len(self._rows) - self._height)

    def _visible(self) -> bool:
        return any(self._rows[self._top :])

    def _token(self, match: re.Match[bytes]) -> bytes:
        token = match[0]
        if match["text"]:
            return self._text(token)
        if match["csi"]:
            return self._sequence(token, match["args"], match["final"])
        if token == b"\n":
            self._newline()
        elif token == b"\r":
            self._home = True
        elif not self._home:
            self._rows[self._row] += token
        return token

    def _text(self, text: bytes) -> bytes:
        shown = text
        if self._home:
            shown = self._prefix + self._style + text
            self._rows[self._row].clear()
            self._home = False
        self._rows[self._row] += shown
        return shown

    def _newline(self) -> None:
        self._home = True
        self._row += 1
        if self._row == len(self._rows):
            self._rows.append(bytearray())
        self._newlines += 1
        if self._newlines >= self._height:  # it has left the rows that it used to redraw
            self._height = 1
        extra = max(0, len(self._rows) - ROWS_KEPT)
        del self._rows[:extra]
        self._row -= extra

    def _sequence(self, token: bytes, args: bytes, final: bytes) -> bytes:
        if final == b"m":
            self._style = _style_after(self._style, token, args)
        elif final in b"AF":
            self._up(int(args or 1), home=final == b"F")
            return token
        elif final == b"K" and (args == b"2" or self._home):
            self._rows[self._row].clear()
            return token
        elif token in (b"\x1b[?25l", b"\x1b[?25h"):
            self._hidden = final == b"l"
            return token
        elif final == b"G":
            return self._column(int(args or 1))
        if not self._home:
            self._rows[self._row] += token
        return token

    def _up(self, count: int, home: bool) -> None:
        missing = max(0, count - self._row)
        self._rows[:0] = [bytearray() for _ in range(missing)]
        self._row += missing - count
        self._height = len(self._rows) - self._row
        self._newlines = 0
        self._home = self._home or home

    def _column(self, column: int) -> bytes:
        """An absolute column counts from the end of the prefix."""
        if column == 1:
            self._home = True
            return b"\r"
        width = len(re.sub(rb"\x1b\[[0-?]*m", b"", self._prefix))
        moved = b"\x1b[%dG" % (column + width)
        self._rows[self._row] += moved
        return moved


def _style_after(style: bytes, token: bytes, args: bytes) -> bytes:
    """The colour sequences in force after `token`."""
    if args.strip(b"0") == b"":
        return b""
    return token if args.startswith(b"0;") or len(style) > 128 else style + token


_TRACEBACKS = re.compile(rb"Traceback \(most recent call last\):|Exception ignored in")


class InterruptFilter:
    """Hides tracebacks of the interrupt after Ctrl-C, and lets all others through.

    Also those from places where Python can raise nothing ("Exception ignored in").
    """

    def __init__(self) -> None:
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        """What may be shown of `data` now."""
        data = self._held + data
        found = _TRACEBACKS.search(data)
        start = found.start() if found else len(data)
        self._held = data[start:]
        return data[:start]

    def close(self) -> bytes:
        """What was withheld for no reason."""
        last = self._held.rstrip().rpartition(b"\n")[2]
        return b"" if last.startswith(b"KeyboardInterrupt") else self._held


class Screen:
    """One file that all ranks write to; at most one of them draws live on it."""

    def __init__(self, write: Callable[[bytes], None], live: LiveRows | None = None) -> None:
        self._write = write
        self._live = live

    def lines(self, text: bytes) -> None:
        """Write whole lines above what is drawn live."""
        if text and self._live:
            text = self._live.clear() + text + self._live.redraw()
        if text:
            self._write(text)

    def draw(self, data: bytes) -> None:
        """Write what came from the live source."""
        assert self._live is not None
        self._write(self._live.feed(data))

    def close(self) -> None:
        """Leave the cursor at the start of a fresh row."""
        if self._live:
            self._write(self._live.close())


class Tail:
    """The last lines of a stream, for the last words of a rank: so many that they go back beyond
    the stacks of its threads, which end those of a crash."""

    def __init__(self, length: int = 1000) -> None:
        self._lines: deque[bytes] = deque(maxlen=length)
        self._cutter = Lines(b"")

    def feed(self, data: bytes) -> None:
        """Remember `data`."""
        self._lines.extend(self._cutter.feed(data).splitlines())

    def text(self) -> str:
        """What is remembered, without colours and other control sequences."""
        self._lines.extend(self._cutter.close().splitlines())
        return plain(b"\n".join(self._lines)).decode(errors="replace")


def plain(text: bytes) -> bytes:
    """`text` without colours and other control sequences, but with its newlines."""
    return _TOKEN.sub(lambda match: match["text"] or (b"\n" if match[0] == b"\n" else b""), text)
