"""Packs flags into a few fp64 numbers, for messages of fp64 numbers. Pure arithmetic."""

from __future__ import annotations

BITS = 48
"""Flags per fp64 number. fp64 represents integers up to 2**53 exactly."""


def pack(flags: list[bool]) -> list[float]:
    """Pack `flags` into `words(len(flags))` numbers."""
    return [
        float(sum(1 << bit for bit, flag in enumerate(flags[start : start + BITS]) if flag))
        for start in range(0, len(flags), BITS)
    ]


def words(count: int) -> int:
    """Return how many fp64 numbers `count` flags need."""
    return -(-count // BITS)


def any_of(rows: list[list[float]], count: int) -> list[bool]:
    """Return, for each of `count` flags, whether it is set in any of `rows`, created by `pack`."""
    union = [0] * words(count)
    for row in rows:
        for index, number in enumerate(row):
            union[index] |= int(number)
    return [bool(union[bit // BITS] >> (bit % BITS) & 1) for bit in range(count)]
