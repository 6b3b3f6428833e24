"""Formats text for terminals: names that are safe to print, and readable numbers."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def printable(value: object) -> str:
    """Escape control characters in `value`, except line breaks, as Python does."""
    # Names of files, hosts and tensors may contain escape sequences, which a terminal would
    # execute.
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in str(value))


def as_utf8(text: str) -> bytes:
    r"""Encode `text` as UTF-8 without failing, even if it contains a file name that is not UTF-8.

    Python represents the bytes of such a name as surrogates, which UTF-8 cannot encode. They are
    written as escapes, such as \udce9.
    """
    return text.encode(errors="backslashreplace")


def in_shell(words: Iterable[str]) -> str:
    """Join `words` as a user would type them in bash, on one line and safe to print.

    A word with control characters is written with escapes, such as $'a\\x0ab'.
    """
    return " ".join(
        shlex.quote(word) if word.isprintable() else f"$'{''.join(map(_ansi_c, word))}'"
        for word in words
    )


def _ansi_c(char: str) -> str:
    """Return a character in the syntax of bash's $'...'."""
    if char in "'\\":
        return f"\\{char}"
    return char if char.isprintable() else "".join(f"\\x{byte:02x}" for byte in os.fsencode(char))


def from_here(file: str) -> str:
    """Return the path of a file, relative to the working directory if the file is inside it."""
    try:
        here = os.getcwd()
    except FileNotFoundError:  # the working folder has been removed
        return file
    return file.removeprefix(f"{here}{os.sep}")


def shortened(text: str) -> str:
    """Replace the middle of each word of 300 characters or more with an ellipsis."""
    return re.sub(r"\S{300,}", lambda word: f"{word[0][:100]}...{word[0][-50:]}", text)


def listed(values: Sequence[object], most: int = 8) -> str:
    """Return the first `most` values, and how many more there are. Return "unknown" for none."""
    shown = ", ".join(map(str, values[:most]))
    return f"{shown} and {len(values) - most} more" if len(values) > most else shown or "unknown"


BYTES = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
"""Units and their size in bytes, largest first."""


def in_bytes(number: int) -> str:
    """Format a number of bytes with its unit, such as "1.6 GB"."""
    return _scaled(number, BYTES, " ") or f"{number} B"


def byte_unit(largest: int) -> tuple[str, float]:
    """Return the unit for an axis that extends to `largest` bytes, and the unit's size in bytes."""
    return next((unit for unit in BYTES if largest >= unit[1]), ("B", 1.0))


def time_unit(longest: float) -> tuple[str, float]:
    """Return the unit for times up to `longest` seconds, and the unit's size in seconds."""
    units = (("s", 1.0), ("ms", 1e-3))
    return next((unit for unit in units if longest >= unit[1]), ("µs", 1e-6))


def in_flops(number: int) -> str:
    """Format a number of floating-point operations with its unit, such as "1.6 TFLOP"."""
    units = (("PFLOP", 1e15), ("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6))
    return _scaled(number, units, " ") or f"{number:,} FLOP"


def in_short(number: int) -> str:
    """Format a count in short form, such as "100.9M"."""
    return _scaled(number, (("B", 1e9), ("M", 1e6), ("k", 1e3)), "") or str(number)


def many(count: int, name: str, ending: str = "s") -> str:
    """Format a count with its noun, such as "1 unit" or "2 units"."""
    return f"{count} {name}{'' if count == 1 else ending}"


def ranks_in_words(ranks: Iterable[int]) -> str:
    """Format numbers of ranks, such as "rank 1" or "ranks 1, 2"."""
    numbers = [str(rank) for rank in ranks]
    return f"rank{'' if len(numbers) == 1 else 's'} {', '.join(numbers)}"


def _scaled(number: int, scales: tuple[tuple[str, float], ...], gap: str) -> str:
    for unit, size in scales:
        if number >= size:
            return f"{number / size:.1f}{gap}{unit}"
    return ""


WIDTH = 100
"""Width of tables in columns if the output is not a terminal."""


def plain_console(*, stderr: bool = False, width: int = WIDTH) -> Console:
    """Return a console that prints text unchanged, without interpreting `:fire:` or `[red]`."""
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False, stderr=stderr)
    if not console.is_terminal:
        console.width = max(console.width, width)
    return console
