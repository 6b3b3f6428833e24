"""Text of others, as a terminal may be given it."""

from __future__ import annotations

import os


def printable(value: object) -> str:
    """`value` with each character that a terminal would obey, rather than show, as Python writes
    it in a string: names of files, hosts and tensors can be anything. Lines stay lines."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in str(value))


def from_here(file: str) -> str:
    """The name of a file, from the working folder on where it lies in that."""
    try:
        here = os.getcwd()
    except FileNotFoundError:  # it has been removed meanwhile
        return file
    return file.removeprefix(f"{here}{os.sep}")
