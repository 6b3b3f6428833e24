"""Packs flags into few fp64 numbers, for messages that are rows of numbers. Pure."""

from __future__ import annotations

BITS = 48
"""Flags per fp64 number, which holds whole numbers up to 2**53."""


def pack(flags: list[bool]) -> list[float]:
    """Return `flags` as few numbers."""
    return [
        float(sum(1 << bit for bit, flag in enumerate(flags[start : start + BITS]) if flag))
        for start in range(0, len(flags), BITS)
    ]


def words(count: int) -> int:
    """Return the number of numbers that hold `count` flags."""
    return -(-count // BITS)


def any_of(rows: list[list[float]], count: int) -> list[bool]:
    """Return the `count` flags that are set in any of `rows`, each made by `pack`."""
    found = [0] * words(count)
    for row in rows:
        for index, number in enumerate(row):
            found[index] |= int(number)
    return [bool(found[bit // BITS] >> (bit % BITS) & 1) for bit in range(count)]
