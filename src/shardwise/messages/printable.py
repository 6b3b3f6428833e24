"""Makes text for terminals: names of others safe to print, and numbers as people read them."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def printable(value: object) -> str:
    """Escape the control characters of `value` as Python does, except line breaks."""
    # Names of files, hosts and tensors can be anything, and a terminal would obey their escapes.
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in str(value))


def as_utf8(text: str) -> bytes:
    """Encode `text`, which may hold a file name that is not UTF-8, without ever failing.

    Python has the bytes of such a name as surrogates, which UTF-8 cannot encode. They become
    escapes, such as \\udce9.
    """
    return text.encode(errors="backslashreplace")


def in_shell(words: Iterable[str]) -> str:
    """`words` as they are typed in bash, on one line and safe to print: one with characters that a
    terminal would obey is written by bytes, as $'a\\x0ab'."""
    return " ".join(
        shlex.quote(word) if word.isprintable() else f"$'{''.join(map(_ansi_c, word))}'"
        for word in words
    )


def _ansi_c(char: str) -> str:
    """Return a character as bash's $'...' writes it."""
    if char in "'\\":
        return f"\\{char}"
    return char if char.isprintable() else "".join(f"\\x{byte:02x}" for byte in os.fsencode(char))


def from_here(file: str) -> str:
    """The name of a file, from the working folder on where it lies in that."""
    try:
        here = os.getcwd()
    except FileNotFoundError:  # it has been removed meanwhile
        return file
    return file.removeprefix(f"{here}{os.sep}")


def shortened(text: str) -> str:
    """`text` with words of more than 300 characters without their middle."""
    return re.sub(r"\S{300,}", lambda word: f"{word[0][:100]}...{word[0][-50:]}", text)


BYTES = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
"""Units and their bytes, the largest first."""


def in_bytes(number: int) -> str:
    """Bytes: 1.6 GB."""
    return _scaled(number, BYTES, " ") or f"{number} B"


def byte_unit(largest: int) -> tuple[str, float]:
    """The unit in which bytes up to `largest` are drawn, and how many bytes it has."""
    return next((unit for unit in BYTES if largest >= unit[1]), ("B", 1.0))


def in_short(number: int) -> str:
    """A count: 100.9M."""
    return _scaled(number, (("B", 1e9), ("M", 1e6), ("k", 1e3)), "") or str(number)


def many(count: int, name: str, ending: str = "s") -> str:
    """A count of things: 1 unit, 2 units."""
    return f"{count} {name}{'' if count == 1 else ending}"


def _scaled(number: int, scales: tuple[tuple[str, float], ...], gap: str) -> str:
    for unit, size in scales:
        if number >= size:
            return f"{number / size:.1f}{gap}{unit}"
    return ""


WIDTH = 100
"""Columns of tables if the output is not a terminal."""


def plain_console(*, stderr: bool = False, width: int = WIDTH) -> Console:
    """Return a console that prints its text unchanged: `:fire:` and `[red]` are no markup."""
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False, stderr=stderr)
    if not console.is_terminal:
        console.width = max(console.width, width)
    return console
