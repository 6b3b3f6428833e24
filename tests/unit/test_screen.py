"""Prefixes and progress bars: bytes in, bytes out."""

import pytest

from shardwise.launch import screen
from shardwise.launch.screen import InterruptFilter, Lines, LiveRow, Tail


@pytest.mark.parametrize(
    ("rank", "size", "color", "seen"),
    [
        (1, 2, False, b"[1] "),
        (1, 11, False, b"[1]  "),
        (10, 11, False, b"[10] "),
        (1, 2, True, b"\x1b[35m[1]\x1b[0m "),
        (6, 8, True, b"\x1b[36m[6]\x1b[0m "),
    ],
)
def test_prefix(rank: int, size: int, color: bool, seen: bytes) -> None:
    assert screen.prefix(rank, size, color=color) == seen


@pytest.mark.parametrize(
    ("pieces", "seen"),
    [
        ([b"one\n"], b"[1] one\n"),
        ([b"on", b"e\ntw", b"o\n"], b"[1] one\n[1] two\n"),
        ([b"unfinished"], b"[1] unfinished\n"),
        ([b"a\n\nb\n"], b"[1] a\n\n[1] b\n"),
        ([b"windows\r\n"], b"[1] windows\n"),
        ([b"  1%\r 50%", b"\r100%\n"], b"[1] 100%\n"),
        ([b" 50%\r"], b"[1]  50%\n"),
        ([b""], b""),
        ([b"\xc3", b"\xa9\n"], b"[1] \xc3\xa9\n"),
    ],
)
def test_lines_of_a_pipe(pieces: list[bytes], seen: bytes) -> None:
    lines = Lines(b"[1] ")
    assert b"".join(map(lines.feed, pieces)) + lines.close() == seen


def test_endless_line_is_cut_and_endless_bar_is_dropped() -> None:
    endless = Lines(b"[1] ")
    assert endless.feed(b"x" * (screen.LONGEST_LINE + 1)) == b"[1] " + b"x" * 65537 + b"\n"
    bar = Lines(b"[1] ")
    assert bar.feed(b"\r 50%" * screen.LONGEST_LINE) == b""
    assert bar.close() == b"[1]  50%\n"


@pytest.mark.parametrize(
    ("pieces", "seen"),
    [
        ([b"one\ntwo"], b"[0] one\n[0] two"),
        ([b"\n\n"], b"\n\n"),
        # a bar that is drawn over itself
        ([b"\r 1%", b"\r 2%"], b"\r[0]  1%\r[0]  2%"),
        # rich: erase the line, then write
        ([b"\r\x1b[2K50%"], b"\r\x1b[2K[0] 50%"),
        # several rows: up, erase, write again
        (
            [b"a\nb", b"\r\x1b[2K\x1b[1A\x1b[2KA\nB"],
            b"[0] a\n[0] b\r\x1b[2K\x1b[1A\x1b[2K[0] A\n[0] B",
        ),
        # the colour follows the prefix, which has its own colour
        ([b"\x1b[31mred\x1b[0m\n"], b"[0] \x1b[31mred\x1b[0m\n"),
        ([b"\xc3", b"\xa9"], b"[0] \xc3\xa9"),
    ],
)
def test_live_row_forwards_with_prefix(pieces: list[bytes], seen: bytes) -> None:
    live = LiveRow(b"[0] ")
    assert b"".join(map(live.feed, pieces)) == seen


@pytest.mark.parametrize(
    ("drawn", "redraw"),
    [
        (b"", b""),
        (b"done\n", b""),
        (b" 50%", b"[0]  50%"),
        (b"\r 49%\r 50%", b"[0]  50%"),
        (b" 50%\r", b"[0]  50%\r"),
        (b" 50%\r\x1b[2K", b""),
        (b"\x1b[32m##", b"[0] \x1b[32m##"),
    ],
)
def test_live_row_makes_room_for_other_lines(drawn: bytes, redraw: bytes) -> None:
    live = LiveRow(b"[0] ")
    live.feed(drawn)
    assert live.clear() == (screen.CLEAR if redraw else b"")
    assert live.redraw() == redraw


@pytest.mark.parametrize(
    ("drawn", "end"),
    [
        (b"done\n", b""),
        (b" 50%", b"\n"),
        (b"\x1b[?25l\x1b[31m 50%", b"\x1b[0m\x1b[?25h\n"),
        (b"\x1b[?25l 50%\n\x1b[?25h", b""),
    ],
)
def test_close_resets_terminal(drawn: bytes, end: bytes) -> None:
    live = LiveRow(b"[0] ")
    live.feed(drawn)
    assert live.close() == end


def test_tail_is_plain_text_of_last_lines() -> None:
    tail = Tail(length=2)
    tail.feed(b"one\n\x1b[31mtwo\x1b[0m\n 1%\r 2")
    tail.feed(b"%\nthree")
    assert tail.text() == " 2%\nthree"


@pytest.mark.parametrize(
    ("pieces", "now", "later"),
    [
        ([b"saving\n", b"saved\n"], b"saving\nsaved\n", b""),
        ([b"x\nTraceback (most recent call last):\n  File\n", b"KeyboardInterrupt\n"], b"x\n", b""),
        (
            [
                b"Exception ignored in: <f>\nTraceback (most",
                b" recent call last):\nKeyboardInterrupt:\n",
            ],
            b"",
            b"",
        ),
        (
            [b"x\nTraceback (most recent call last):\n  File\n", b"OSError: full\n"],
            b"x\n",
            b"Traceback (most recent call last):\n  File\nOSError: full\n",
        ),
        # The rank was ended while it printed.
        ([b"x\nTraceback (most recent call last):\n", b"  File, in <module>\n"], b"x\n", b""),
        (
            [b"Traceback (most recent call last):\n  File\nOSError: full\n  of what\n"],
            b"",
            b"Traceback (most recent call last):\n  File\nOSError: full\n  of what\n",
        ),
    ],
)
def test_interrupt_filter_hides_only_keyboard_interrupt(
    pieces: list[bytes], now: bytes, later: bytes
) -> None:
    hush = InterruptFilter()
    assert b"".join(map(hush.feed, pieces)) == now
    assert hush.close() == later


class Terminal:
    """A terminal that understands the cursor movements of progress bars."""

    def __init__(self) -> None:
        self.rows, self.row = [""], 0

    def write(self, data: bytes) -> None:
        for piece in screen._PIECES.split(data):
            text = piece.decode()
            if text == "\n":
                self.row += 1
                self.rows += [""] * (self.row == len(self.rows))
            elif up := screen._UP.fullmatch(piece):
                self.row = max(0, self.row - int(up[1] or 1))
            elif text.endswith("B") and text.startswith("\x1b["):
                self.row = min(len(self.rows) - 1, self.row + int(text[2:-1]))
            elif text.startswith("\x1b["):
                self.rows[self.row] = "" if text[-1] in "JK" else self.rows[self.row]
                if text[-1] == "J":
                    del self.rows[self.row + 1 :]
            elif text and text != "\r":
                self.rows[self.row] = text


NESTED = [b"\router 0%", b"\n\rinner 0%\x1b[A", b"\router 50%", b"\n\rinner 50%\x1b[A"]
SEVERAL = [b"one 0%\ntwo 0%", b"\r\x1b[2K\x1b[1A\x1b[2Kone 50%\ntwo 50%"] * 2


@pytest.mark.parametrize("bars", [NESTED, SEVERAL], ids=["nested", "several"])
def test_lines_of_other_ranks_survive_bars_with_several_rows(bars: list[bytes]) -> None:
    terminal, live = Terminal(), LiveRow(b"[0] ")
    for number, piece in enumerate(bars):
        terminal.write(live.feed(piece))
        for letter in "ab":
            terminal.write(live.clear() + f"[1] {letter}{number}".encode() + b"\n" + live.redraw())
    shown = [row for row in terminal.rows if row.startswith("[1] ")]
    assert shown == [f"[1] {letter}{number}" for number in range(len(bars)) for letter in "ab"]
    assert any(row.endswith("50%") for row in terminal.rows)
